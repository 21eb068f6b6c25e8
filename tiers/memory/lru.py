"""Least recently used, as links between blocks. Engine thread only.

Links take 16 bytes a block; an ordered dict takes 120.

A block may be on the device and on the host at once, so it has links for each. The two classes
differ only in the names of the links. This is the hot path, where looking up a name costs as much
as the call.
"""

from collections.abc import Iterator
from itertools import islice

from tiers.memory.block import NO_BLOCK, Block
from tiers.policy.policy import Policy, Use
from tiers.policy.quota import FairPolicy, Quotas
from tiers.tier import TierName


def _ring() -> Block:
    """The head of a ring: its `newer` is the oldest block, its `older` the newest."""
    ring = Block(0.0)
    ring.older = ring.newer = ring.host_older = ring.host_newer = ring
    return ring


class DeviceLru:
    """A `Policy[Block]` for the device. A held or absent block has no neighbours."""

    def __init__(self) -> None:
        self._ring = _ring()

    def insert(self, key: Block, use: Use) -> None:
        ring = self._ring
        key.older, key.newer = newest, _ = ring.older, ring
        newest.newer = ring.older = key

    release = insert

    def hold(self, key: Block) -> None:
        older, newer = key.older, key.newer
        older.newer, newer.older = newer, older
        key.older = key.newer = NO_BLOCK

    def touch(self, key: Block, use: Use) -> None:
        self.hold(key)
        self.release(key, use)

    def remove(self, key: Block) -> None:
        if key.newer is not NO_BLOCK:
            self.hold(key)

    def victim(self) -> Block | None:
        block = self._ring.newer
        if block is self._ring:
            return None
        self.hold(block)
        return block

    def coldest(self, count: int) -> list[Block]:
        return list(islice(self._oldest_first(), count))

    def _oldest_first(self) -> Iterator[Block]:
        block = self._ring.newer
        while block is not self._ring:
            yield block
            block = block.newer


class HostLru(DeviceLru):
    """The same by the links for the host."""

    def insert(self, key: Block, use: Use) -> None:
        ring = self._ring
        key.host_older, key.host_newer = newest, _ = ring.host_older, ring
        newest.host_newer = ring.host_older = key

    release = insert

    def hold(self, key: Block) -> None:
        older, newer = key.host_older, key.host_newer
        older.host_newer, newer.host_older = newer, older
        key.host_older = key.host_newer = NO_BLOCK

    def remove(self, key: Block) -> None:
        if key.host_newer is not NO_BLOCK:
            self.hold(key)

    def victim(self) -> Block | None:
        block = self._ring.host_newer
        if block is self._ring:
            return None
        self.hold(block)
        return block

    def _oldest_first(self) -> Iterator[Block]:
        block = self._ring.host_newer
        while block is not self._ring:
            yield block
            block = block.host_newer


def order_of(tier: TierName, num_blocks: int, quotas: Quotas | None = None) -> Policy[Block]:
    """The order of a memory tier's blocks. With quotas, each group has its own."""
    order = DeviceLru if tier is TierName.DEVICE else HostLru
    if quotas is None:
        return order()
    return FairPolicy(quotas, order, quotas.capacity_bytes // num_blocks)
