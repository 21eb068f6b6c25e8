"""The memory that all layouts of a node share: its use, its owners, and one order of eviction.

    by group of owners: the one furthest over its share first, and none within its share
        by use: the coldest first

Without quotas there is one group. The node's thread only.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import islice

from tiers.blocks.frames import Arena
from tiers.memory.block import Block
from tiers.memory.room import HostRoom
from tiers.memory.write_queue import WriteQueue
from tiers.policy.policy import Use
from tiers.policy.quota import COMMON, Quotas

Idle = OrderedDict[Block, None]
LOCKABLE_SHARE = 0.9  # of the capacity; the rest is for layouts that come later
SPARE_BYTES = 256 << 20  # of frames that have memory and no block, for blocks that load
SPARE_SHARE = 1 / 4  # of the capacity, at most


class Capacity:
    """A `Policy[Block]` over the blocks of all layouts. `used_bytes` is what their frames take,
    `kept_bytes` what locked and spare frames without a block do, `locked_bytes` what all locked
    ones do, `spare_bytes` what spare ones do. `quotas` divide it among owners."""

    def __init__(self, capacity_bytes: int, quotas: Quotas | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = self.kept_bytes = self.locked_bytes = self.spare_bytes = 0
        self.spare_holders: list[Callable[[int], int]] = []  # give so many bytes back to the system
        self.asker: Arena | None = None  # the layout that wanted a frame last
        self.quotas = quotas
        self.rooms: dict[Arena, HostRoom] = {}
        self.queues: list[WriteQueue] = []  # of all layouts
        self._groups: dict[Block, tuple[Hashable, int]] = {}  # and the bytes of its frame
        self._idle: dict[Hashable, Idle] = {}
        self._victims: Hashable = COMMON  # the group now losing blocks

    def reserve(self, num_bytes: int) -> bool:
        """Count a frame of so many bytes. False if it does not fit."""
        fits = self._make_room(num_bytes)
        self.used_bytes += num_bytes if fits else 0
        return fits

    def keep_spare(self, num_bytes: int) -> bool:
        """Count a spare frame. False if there are enough, or it does not fit."""
        most = min(SPARE_BYTES, int(SPARE_SHARE * self.capacity_bytes))
        if num_bytes > min(most - self.spare_bytes, self._room_bytes):
            return False
        self.spare_bytes += num_bytes
        self.kept_bytes += num_bytes
        return True

    def drop_spare(self, num_bytes: int) -> None:
        """A spare frame is none any more: it has no memory, or a block."""
        self.spare_bytes -= num_bytes
        self.kept_bytes -= num_bytes

    def lock(self, num_bytes: int, free_bytes: int) -> bool:
        """Count a piece that a client locks, and its free frames. False if they do not fit."""
        locked = self.locked_bytes + num_bytes
        if locked > LOCKABLE_SHARE * self.capacity_bytes or not self._make_room(free_bytes):
            return False
        self.locked_bytes = locked
        self.kept_bytes += free_bytes
        return True

    def room_of(self, block: Block) -> HostRoom:
        assert block.frame is not None, f"{block} has no frame"
        return self.rooms[block.frame.memory]

    # The order of eviction.

    def insert(self, key: Block, use: Use) -> None:
        assert key.frame is not None, f"{key} has no frame"
        num_bytes = key.frame.memory.stride
        group = self._group(key)
        self._groups[key] = group, num_bytes
        if self.quotas is not None:
            self.quotas.charge(group, num_bytes)
        self.release(key, use)

    def hold(self, key: Block) -> None:
        self._idle_of(key).pop(key)

    def release(self, key: Block, use: Use) -> None:
        self._idle_of(key)[key] = None

    def touch(self, key: Block, use: Use) -> None:
        self._idle_of(key).move_to_end(key)

    def remove(self, key: Block) -> None:
        if key not in self._groups:
            return
        self._idle_of(key).pop(key, None)
        group, num_bytes = self._groups.pop(key)
        if self.quotas is not None:
            self.quotas.credit(group, num_bytes)

    def victim(self) -> Block | None:
        block = next(self._leaving(), None)
        if block is not None:
            self.remove(block)
        return block

    def coldest(self, count: int) -> list[Block]:
        return list(islice(self._leaving(), count))

    @property
    def num_idle(self) -> int:
        return sum(map(len, self._idle.values()))

    def regroup(self) -> None:
        """Recount each owner's blocks after the owners of scopes have changed."""
        if self.quotas is None:
            return
        idle = [block for each in self._idle.values() for block in each]
        used: dict[Hashable, int] = {}
        for block, (_, num_bytes) in self._groups.items():
            group = self._group(block)
            self._groups[block] = group, num_bytes
            used[group] = used.get(group, 0) + num_bytes
        self.quotas.reset(used)
        self._idle.clear()
        for block in sorted(idle, key=lambda each: each.use.time_s):
            self._idle_of(block)[block] = None

    def check(self) -> None:
        used: dict[Hashable, int] = {}
        for group, num_bytes in self._groups.values():
            used[group] = used.get(group, 0) + num_bytes
        assert sum(used.values()) == self.used_bytes
        assert 0 <= self.spare_bytes <= self.kept_bytes <= self.capacity_bytes - self.used_bytes
        if self.quotas is not None:
            counted = {group: used_ for group, (used_, _) in self.quotas.usage().items() if used_}
            assert used == counted, (used, counted)

    @property
    def _room_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes - self.kept_bytes

    def _make_room(self, num_bytes: int) -> bool:
        """Whether so many bytes fit, with fewer spare frames if need be."""
        for give_back in self.spare_holders:
            if num_bytes > self._room_bytes:
                give_back(num_bytes - self._room_bytes)
        return num_bytes <= self._room_bytes

    def _group(self, block: Block) -> Hashable:
        return self.quotas.group(block.scope) if self.quotas is not None else COMMON

    def _idle_of(self, block: Block) -> Idle:
        return self._idle.setdefault(self._groups[block][0], OrderedDict())

    def _leaving(self) -> Iterator[Block]:
        """Idle blocks in their order, without those whose frames are locked for another layout:
        the one that asks would not get their memory."""
        for block in self._coldest_group():
            assert block.frame is not None, f"{block} has no frame"
            if self.asker is None or self.asker.can_reuse(block.frame):
                yield block

    def _coldest_group(self) -> Idle:
        """The idle blocks of the group furthest over its share, of those that have any."""
        quotas = self.quotas
        if quotas is None:
            return self._idle.get(COMMON, OrderedDict())
        if not (self._idle.get(self._victims) and quotas.is_over(self._victims)):
            over = [g for g, blocks in self._idle.items() if blocks and quotas.is_over(g)]
            if not over:
                return OrderedDict()
            self._victims = max(over, key=quotas.pressure)
        return self._idle[self._victims]
