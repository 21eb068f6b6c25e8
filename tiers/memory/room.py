"""Room in the memory tiers: a place for a new owner, and which blocks give theirs up for it.

A place is a slot on the device or a frame on the host. Where none is free, windows leave that no
use needed, then blocks. A block without its windows moves to a lesser place, and back to a whole
one when its windows are wanted again. Engine thread only.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable
from typing import Generic, Protocol, TypeVar

from tiers.blocks.frames import Arena, Frame
from tiers.blocks.part import Part
from tiers.errors import CopyFailed
from tiers.memory.block import Block
from tiers.memory.claims import Claims
from tiers.memory.copies import Copies
from tiers.memory.counters import MemoryCounters
from tiers.memory.device import DevicePool
from tiers.memory.device_tier import DeviceTier
from tiers.memory.evictor import Evictor
from tiers.memory.host_tier import HostTier
from tiers.memory.passed import PassedWindows
from tiers.tier import TierName

Place = TypeVar("Place")


class PlacePool(Protocol[Place]):
    """BlockPlaces to take and to give back: a `DevicePool` or an `Arena`."""

    @property
    def num_lesser_free(self) -> int: ...

    def take(self, *, lesser: bool = False) -> Place | None: ...

    def give(self, place: Place, /) -> None: ...

    def reuse(self, place: Place, /, *, lesser: bool = False) -> Place | None: ...

    def lessen(self, place: Place, /) -> Place: ...

    def move(self, place: Place, to: Place, /) -> None: ...


class MemoryRoom(ABC, Generic[Place]):
    """The places of one memory tier."""

    tier: TierName
    passed: PassedWindows

    def __init__(self, pool: PlacePool[Place], claims: Claims, copies: Copies) -> None:
        self._pool = pool
        self._claims = claims
        self._copies = copies

    def take(
        self, tenant: Hashable, sparing: Collection[Block] = (), *, lesser: bool = False
    ) -> Place | None:
        """A place for a new owner, taken from the coldest unused block if necessary, but from none
        in `sparing`. With `lesser`, it is one for a block without its windows."""
        place = self._pool.take(lesser=lesser)
        while place is None:
            if self._give_up_windows(sparing):
                place = self._pool.take(lesser=lesser)
                continue
            left = self._evict(tenant, sparing)
            if left is None:
                return None
            place = self._pool.reuse(left, lesser=lesser)
            if place is None and self._gather(left):
                place = self._pool.take()
        return place

    def _give_up_windows(self, sparing: Collection[Block]) -> bool:
        """Make room by giving up windows that no use needed. False if there are none."""
        block = self.passed.next()
        while block is not None and not self._may_lose_windows(block):
            block = self.passed.next()
        if block is None or block in sparing:
            return False
        if self._pool.num_lesser_free:
            self._move_to_lesser(block)
        else:
            self._moved(block, self._pool.lessen(self._place(block)))
        return True

    def _move_to_lesser(self, block: Block) -> bool:
        """Move a block that nobody uses to a free lesser place. False if the copy failed."""
        place = self._pool.take(lesser=True)
        assert place is not None
        try:
            self._move(block, place)
        except CopyFailed as error:
            self._copies.failed(self.tier, error)
            return False
        return True

    def _move(self, block: Block, to: Place) -> None:
        """Move a block without its windows. Raises CopyFailed, after giving back `to`."""
        place = self._place(block)
        try:
            self._pool.move(place, to)
        except CopyFailed:
            self._pool.give(to)
            raise
        self._moved(block, to)
        self._pool.give(place)

    def _gather(self, place: Place) -> bool:
        """After a lesser place was given back, empty the whole one around it, if possible."""
        return False

    @abstractmethod
    def _place(self, block: Block) -> Place:
        """The block's place in this tier."""

    @abstractmethod
    def _moved(self, block: Block, to: Place) -> None:
        """Take in that the block has another place, or that its place was cut."""

    @abstractmethod
    def _may_lose_windows(self, block: Block) -> bool:
        """Whether this tier may give up the block's windows."""

    @abstractmethod
    def _evict(self, tenant: Hashable, sparing: Collection[Block]) -> Place | None:
        """The place of a block that had to leave. None if none can."""


class DeviceRoom(MemoryRoom[int]):
    tier = TierName.DEVICE

    def __init__(
        self,
        pool: DevicePool,
        device: DeviceTier,
        host: HostTier,
        claims: Claims,
        copies: Copies,
        counters: MemoryCounters,
        evictor: Evictor,
    ) -> None:
        super().__init__(pool, claims, copies)
        self.passed = device.passed
        self._places = pool.places
        self._device = device
        self._host = host
        self._counters = counters
        self._evictor = evictor
        self.num_moved = 0  # counts up: blocks that got another slot while sequences may use them

    def widen(self, block: Block) -> bool:
        """Move a block to a whole slot, with room for its windows. It may be in use: sequences that
        have its slot in their tables must look again, see `num_moved`. False if there is none.
        Raises CopyFailed."""
        assert block.slot is not None and block.ref_count, f"{block} may leave"
        if not self._places.is_lesser(block.slot):
            return True
        block.busy += 1  # its frame has its windows
        self._host.sync(block)
        slot = self.take(block.scope)
        block.busy -= 1
        self._host.sync(block)
        if slot is None:
            return False
        self._move(block, slot)
        self.num_moved += 1
        return True

    def exchange(self, block: Block, whole: Block) -> None:
        """Give a block in a lesser slot the whole slot of its equal, and that one the lesser."""
        assert block.slot is not None and whole.slot is not None
        self._counters.moved_slot(block.slot, whole.slot)
        self._device.exchange(block, whole)
        self.num_moved += 1

    def _gather(self, place: int) -> bool:
        """Do so if nobody uses the blocks in the other parts, and others have room for them."""
        blocks = self._device.beside(place)
        if not blocks or self._places.num_lesser_free < self._places.num_lesser:
            return False
        self._places.take_last(place)
        moved = [self._move_to_lesser(block) for block in blocks]
        return all(moved)

    def _place(self, block: Block) -> int:
        assert block.slot is not None, f"{block} has no slot"
        return block.slot

    def _moved(self, block: Block, to: int) -> None:
        self._counters.moved_slot(self._place(block), to)
        self._device.moved(block, to)

    def _may_lose_windows(self, block: Block) -> bool:
        """Whether the host or a lower tier has them or, if there is none, nobody else could."""
        if block.held_below or self._host.frames is None:
            return True
        if block.frame is None:
            return self._evictor.demote(block)
        return block.frame.part is Part.WHOLE

    def _evict(self, tenant: Hashable, sparing: Collection[Block]) -> int | None:
        victim = self._device.victim()
        if victim is None:
            return None
        cause = self._claims.cause(self.tier, victim, tenant)
        return self._evictor.off_device(victim, cause)


class HostRoom(MemoryRoom[Frame]):
    """Frames. Rooms that share one order of eviction may have to give up each other's blocks."""

    tier = TierName.HOST

    def __init__(
        self,
        frames: Arena,
        host: HostTier,
        claims: Claims,
        copies: Copies,
        counters: MemoryCounters,
        evictor: Evictor,
    ) -> None:
        super().__init__(frames, claims, copies)
        self.passed = host.passed
        self._frames = frames
        self._host = host
        self._counters = counters
        self._evictor = evictor
        self.room_of: Callable[[Block], HostRoom] = lambda block: self
        self.sharers: Collection[HostRoom] = (self,)

    def widen(self, block: Block, sparing: Collection[Block]) -> bool:
        """Move a block to a whole frame, with room for its windows. False if there is none."""
        frame = self._place(block)
        if not frame.is_lesser:
            return True
        if block.busy:
            return False
        whole = self.take(block.scope, sparing)
        if whole is None:
            return False
        assert block.frame is frame, f"{block} lost its frame"
        self._move(block, whole)
        return True

    def _place(self, block: Block) -> Frame:
        assert block.frame is not None, f"{block} has no frame"
        return block.frame

    def _moved(self, block: Block, to: Frame) -> None:
        self._counters.moved_frame(self._place(block).number, to.number)
        block.frame = to
        self._host.sync(block)

    def _may_lose_windows(self, block: Block) -> bool:
        """Whether a lower tier has them or, if there is none, nobody else could."""
        return block.held_below or not self._host.has_below

    def _evict(self, tenant: Hashable, sparing: Collection[Block]) -> Frame | None:
        self._claims.weigh_frame(tenant, 1)
        block = self._host.victim(sparing)
        if block is None and not sparing:
            block = self._pinned_victim()
        self._claims.weigh_frame(tenant, -1)
        if block is None:
            return None
        cause = self._claims.cause(self.tier, block, tenant)
        return self.room_of(block)._evictor.off_host(block, cause)

    def _pinned_victim(self) -> Block | None:
        """A pinned block to leave the host: none of an owner within its share."""

        def may_lose(block: Block) -> bool:
            return self._claims.may_lose_frame(block) and self._frames.can_reuse(self._place(block))

        victims = (each._host.pinned_victim(may_lose) for each in self.sharers)
        return next((block for block in victims if block is not None), None)
