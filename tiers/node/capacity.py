"""The memory that all layouts of a node share: its use, its owners, and the order of eviction.

    by group of owners: the one furthest over its share first, and none within its share
        by use: the coldest first; among the coldest 64, one that is held below, so nothing is lost
    pinned blocks, once no other block is idle

Without quotas there is one group. The node's thread only.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Protocol

from tiers.blocks.keys import PrefixKey
from tiers.node.block import NodeBlock
from tiers.policy.quota import COMMON, Quotas
from tiers.tier import Cause

LOOK_FOR_CLEAN = 64  # coldest blocks searched for one that is held below


class BlockHolder(Protocol):
    """The blocks of one layout, as the order of eviction needs them."""

    @property
    def frame_bytes(self) -> int: ...

    def blocks(self) -> Iterable[NodeBlock]:
        """Every block that has a frame."""

    def evict(self, block: NodeBlock, cause: Cause, *, keeps_memory: bool) -> None: ...


Idle = OrderedDict[NodeBlock, BlockHolder]


class Capacity:
    """`used_bytes` is what the frames of all layouts take. `quotas` divide it among owners."""

    def __init__(self, capacity_bytes: int, quotas: Quotas | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.quotas = quotas
        self.sharers: list[BlockHolder] = []
        self._idle: dict[Hashable, Idle] = {}
        self._pinned: Idle = OrderedDict()
        self._victims: Hashable = COMMON  # the group now losing blocks
        self._tick = 0

    def make_room(self, num_bytes: int, asker: BlockHolder, scope: PrefixKey) -> bool:
        """Evict until `num_bytes` fit. Returns False if they cannot.

        The requester counts as having them already, so among equal shares its own block leaves. An
        owner over its share whose blocks are all in use gets no more while all others are within
        theirs.
        """
        group = self._group(scope)
        if self.quotas is not None:
            self.quotas.charge(group, num_bytes)
        try:
            while self.used_bytes + num_bytes > self.capacity_bytes:
                victim = self._victim()
                if victim is None:
                    return False
                block, holder = victim
                cause = Cause.ROOM if block.group == group else Cause.QUOTA
                holder.evict(block, cause, keeps_memory=holder is asker)
        finally:
            if self.quotas is not None:
                self.quotas.credit(group, num_bytes)
        return True

    def take(self, block: NodeBlock, num_bytes: int) -> None:
        """Count the frame that the block now has."""
        self.used_bytes += num_bytes
        block.group = self._group(block.id.scope)
        if self.quotas is not None:
            self.quotas.charge(block.group, num_bytes)

    def give_back(self, block: NodeBlock, num_bytes: int) -> None:
        """Uncount the frame that the block had."""
        self.used_bytes -= num_bytes
        self.set_busy(block)
        if self.quotas is not None:
            self.quotas.credit(block.group, num_bytes)

    def touch(self, block: NodeBlock) -> None:
        """Make the block the hottest. It takes that place when it is idle again."""
        self._tick += 1
        block.tick = self._tick
        self.set_busy(block)

    def set_idle(self, block: NodeBlock, holder: BlockHolder) -> None:
        """Allow the unused block to leave. It keeps its place if it was idle already."""
        place, other = self._idle_of(block), self._pinned
        if block.pinned:
            place, other = other, place
        other.pop(block, None)
        place.setdefault(block, holder)

    def set_busy(self, block: NodeBlock) -> None:
        """Forbid the block to leave: it is in use, or must stay."""
        self._idle_of(block).pop(block, None)
        self._pinned.pop(block, None)

    def is_idle(self, block: NodeBlock) -> bool:
        return block in self._idle_of(block) or block in self._pinned

    @property
    def num_idle(self) -> int:
        return sum(map(len, self._idle.values())) + len(self._pinned)

    def regroup(self) -> None:
        """Recount each owner's blocks after the owners of scopes have changed."""
        if self.quotas is None:
            return
        used: dict[Hashable, int] = {}
        idle = {block: holder for each in self._idle.values() for block, holder in each.items()}
        for sharer in self.sharers:
            for block in sharer.blocks():
                block.group = self._group(block.id.scope)
                used[block.group] = used.get(block.group, 0) + sharer.frame_bytes
        self.quotas.reset(used)
        self._idle.clear()
        for block in sorted(idle, key=lambda each: each.tick):
            self._idle_of(block)[block] = idle[block]

    def check(self) -> None:
        """Assert that the counts equal what the frames take."""
        used: dict[Hashable, int] = {}
        for sharer in self.sharers:
            for block in sharer.blocks():
                used[block.group] = used.get(block.group, 0) + sharer.frame_bytes
        assert sum(used.values()) == self.used_bytes <= self.capacity_bytes
        if self.quotas is not None:
            counted = {group: used_ for group, (used_, _) in self.quotas.usage().items() if used_}
            assert used == counted, (used, counted)

    def _group(self, scope: PrefixKey) -> Hashable:
        return self.quotas.group(scope) if self.quotas is not None else COMMON

    def _idle_of(self, block: NodeBlock) -> Idle:
        return self._idle.setdefault(block.group, OrderedDict())

    def _victim(self) -> tuple[NodeBlock, BlockHolder] | None:
        coldest = self._furthest_over() or self._pinned_over()
        for number, entry in enumerate(coldest.items()):
            if entry[0].is_below:
                return entry
            if number == LOOK_FOR_CLEAN:
                break
        return next(iter(coldest.items()), None)

    def _furthest_over(self) -> Idle | None:
        """The idle blocks of the group furthest over its share, among groups that have idle
        blocks."""
        quotas = self.quotas
        if quotas is None:
            return self._idle.get(COMMON)
        if not (self._idle.get(self._victims) and quotas.is_over(self._victims)):
            over = [g for g, blocks in self._idle.items() if blocks and quotas.is_over(g)]
            if not over:
                return None
            self._victims = max(over, key=quotas.pressure)
        return self._idle[self._victims]

    def _pinned_over(self) -> Idle:
        quotas = self.quotas
        if quotas is None:
            return self._pinned
        return OrderedDict(each for each in self._pinned.items() if quotas.is_over(each[0].group))
