"""Runs a policy of prefix keys over blocks.

Policies that remember evicted blocks (ghosts), or that order children before parents, need names
that outlive a `Block`. Here they get prefix keys. Engine thread only.
"""

from collections.abc import Hashable

from tiers.memory.block import Block
from tiers.memory.lru import DeviceLru, HostLru
from tiers.policy.names import PolicyName
from tiers.policy.policy import Policy, Use
from tiers.policy.quota import FairPolicy, Quotas
from tiers.policy.registry import make_policy, policy_in
from tiers.tier import TierName


class ByPrefix:
    """A `Policy[Block]` over a policy of keys.

    A block is known by its key. A block without a key (partly filled), or whose key is taken, is
    known by itself. Invariant: over the blocks in the tier, the two maps are inverses.
    """

    def __init__(self, policy: Policy[Hashable]) -> None:
        self._policy = policy
        self._names: dict[Block, Hashable] = {}
        self._blocks: dict[Hashable, Block] = {}

    def insert(self, key: Block, use: Use, parent: Block | None = None, depth: int = 0) -> None:
        name: Hashable = key.key
        if name is None or name in self._blocks:
            name = key
        self._names[key], self._blocks[name] = name, key
        above = key.parent if key.parent in self._blocks else None
        self._policy.insert(name, use, above, depth)

    def hold(self, key: Block) -> None:
        self._policy.hold(self._names[key])

    def release(self, key: Block, use: Use) -> None:
        self._policy.release(self._names[key], use)

    def touch(self, key: Block, use: Use) -> None:
        self._policy.touch(self._names[key], use)

    def remove(self, key: Block) -> None:
        name = self._names.pop(key, None)
        if name is not None:
            del self._blocks[name]
            self._policy.remove(name)

    def victim(self) -> Block | None:
        name = self._policy.victim()
        if name is None:
            return None
        block = self._blocks.pop(name)
        del self._names[block]
        return block

    def coldest(self, count: int) -> list[Block]:
        return [self._blocks[name] for name in self._policy.coldest(count)]


def rank(
    tier: TierName, name: str, capacity_blocks: int, quotas: Quotas | None = None
) -> Policy[Block]:
    """Make the policy called `name` for a memory tier's blocks. Raises ConfigurationError if
    unknown.

    LRU needs no names of evicted blocks, so it orders the blocks themselves: this is the hot path.
    With quotas, each group has its own policy.
    """
    own = policy_in(tier, name)

    def make() -> Policy[Block]:
        if own == PolicyName.LRU:
            return DeviceLru() if tier is TierName.DEVICE else HostLru()
        return ByPrefix(make_policy(own, capacity_blocks))

    if quotas is None:
        return make()
    return FairPolicy(quotas, make, quotas.capacity_bytes // capacity_blocks)
