"""Who owns which memory: slots of the device pool and frames of the host arena, and their eviction.

Engine thread only. The promoter and the demoter move blocks between tiers; this is the bookkeeping
they share. A block is in the index exactly while it has a slot or a frame, or is being computed.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Hashable, Mapping, Sequence
from typing import NamedTuple

from tiers.blocks.frames import Frame, FrameArena
from tiers.blocks.keys import PrefixKey
from tiers.memory.claims import Claims
from tiers.memory.counters import CacheEvent, Chronicle
from tiers.memory.device import Copy, DevicePool
from tiers.memory.index import NEVER_USED, Block, BlockIndex, BlockState
from tiers.policy import Policy, Use
from tiers.policy.quota import Quotas
from tiers.telemetry.departures import Departures
from tiers.telemetry.events import EventStream
from tiers.telemetry.lifetimes import Cause
from tiers.tier import TierName

NUM_VICTIMS_SEEN = 8  # how many of the coldest host blocks are looked at for one that costs nothing


class _Copying(NamedTuple):
    """A copy under way; the frames of its blocks must stay until it has arrived."""

    copy: Copy
    blocks: Sequence[Block]
    source: TierName
    target: TierName
    started: float  # time.perf_counter()


class Residency:
    """Slots and frames and their policies; the chronicle hears of all that moves.

    Invariants, checked by `check`: every slot is free or one block's; every frame is free or one
    block's; a pinned block is not a candidate of the policy of the tier it is needed in.

    A *kept* block is under an operator's pin (`tiers.operations.pins`). It leaves the device after
    all
    others, and the host only once the disk has it; the policies see it as held. A *lent* block was
    promoted from a host tier that gives such copies up first (`Promotion.MOVE`).
    """

    def __init__(
        self,
        index: BlockIndex,
        pool: DevicePool,
        frames: FrameArena | None,
        device_policy: Policy[Block],
        host_policy: Policy[Block],
        stream: EventStream | None = None,
        *,
        host_moves: bool = False,
        quotas: Mapping[TierName, Quotas] | None = None,
    ) -> None:
        self.index = index
        self.pool = pool
        self.frames = frames
        self.device_policy = device_policy
        self.host_policy = host_policy
        self.chronicle = Chronicle(pool.layout.nbytes, stream or EventStream())
        self.departures = Departures()
        self.num_device_candidates = 0
        self.num_host_blocks = 0
        self.kept_keys: Container[PrefixKey] = ()
        self.on_rest: Callable[[Block], None] | None = None  # told of blocks that nobody uses
        self.on_left_host: Callable[[Block], None] | None = None  # of clean ones that left
        self._host_moves = host_moves
        self._claims = Claims(quotas or {}, pool.layout.nbytes)
        self._kept_idle: OrderedDict[Block, None] = OrderedDict()  # on the device, coldest first
        self._kept_frames: OrderedDict[Block, None] = OrderedDict()  # that nobody uses
        self._lent_frames: OrderedDict[Block, None] = OrderedDict()  # the same, oldest first
        self._copies: list[_Copying] = []

    def count(self, tier: TierName, event: CacheEvent, blocks: int = 1) -> None:
        self.chronicle.count(tier, event, blocks)

    # Pins: who needs a block.

    def pin(self, block: Block) -> None:
        """The block's KV is needed and must not leave."""
        block.pins += 1
        if block.pins == 1:
            if block.ranked:
                if block.kept:
                    del self._kept_idle[block]
                else:
                    self.device_policy.hold(block)
                self.num_device_candidates -= 1
            elif block.frame is not None:
                self._sync_host(block)

    def pin_run(self, blocks: Sequence[Block]) -> None:
        """Pin blocks that were hit; the hot path of a lookup."""
        self.chronicle.reused(blocks)
        hold, held = self.device_policy.hold, 0
        for block in blocks:
            block.hits += 1
            block.left_disk = block.left_host = False
            block.pins += 1
            if block.pins == 1:
                if block.ranked:
                    if block.kept:
                        del self._kept_idle[block]
                    else:
                        hold(block)
                    held += 1
                elif block.frame is not None:
                    self._sync_host(block)
        self.num_device_candidates -= held

    def unpin(self, block: Block, use: Use) -> None:
        """Give a pin back. Unpin a chain tail first, so that a leaf leaves before its parent."""
        block.pins -= 1
        assert block.pins >= 0, f"{block} was released once too often"
        if block.pins:
            return
        block.use = use
        if block.slot is not None:
            if block.key is None and block.parent is None:
                self._unrank(block)
                self._claims.release_slot(block)
                self.pool.give(block.slot)
                block.slot = None
                return
            self.num_device_candidates += 1
            if not block.ranked:
                block.ranked = True
                self._claims.release_slot(block)
                self.device_policy.insert(block, use, None, block.depth)
                if block.kept:
                    self.device_policy.hold(block)
            elif not block.kept:
                self.device_policy.release(block, use)
            if block.kept:
                self._kept_idle[block] = None
        elif block.frame is not None:
            self._sync_host(block)
        if self.on_rest is not None:
            self.on_rest(block)

    # Kept blocks: what an operator pinned.

    def entered(self, block: Block) -> bool:
        """The block came into the index with its KV; whether it is to be kept."""
        if block.key in self.kept_keys:
            self.keep(block)
        return block.kept

    def keep(self, block: Block) -> None:
        """From now on the block leaves after all others, and only to where it stands as well."""
        if block.kept:
            return
        block.kept = True
        if block.ranked and block.pins == 0:
            self.device_policy.hold(block)
            self._kept_idle[block] = None
        self._sync_host(block)

    def unkeep(self, block: Block) -> None:
        """The block is like any other again."""
        if not block.kept:
            return
        block.kept = False
        if block in self._kept_idle:
            del self._kept_idle[block]
            self.device_policy.release(block, block.use)
        self._sync_host(block)

    # Slots.

    @property
    def num_allocatable(self) -> int:
        """Slots that `take_slot` could hand out now."""
        return self.pool.num_free + self.num_device_candidates

    def take_slot(self, block: Block, tenant: Hashable) -> int | None:
        """Give the block a slot, evicting the coldest unreferenced one if need be."""
        self._claims.claim_slot(block, tenant)
        slot = self.pool.take()
        if slot is None:
            victim = self.device_policy.victim() or self._kept_victim()
            if victim is None:
                self._claims.release_slot(block)
                return None
            self.num_device_candidates -= 1
            victim.ranked = False
            cause = self._claims.cause(TierName.DEVICE, victim, tenant)
            slot = self.pool.hand_on(self._leave_device(victim, cause))
        block.slot = slot
        return slot

    def _kept_victim(self) -> Block | None:
        """Only kept blocks are left: one that stands below as well, if there is any."""
        if not self._kept_idle:
            return None
        clean = (b for b in self._kept_idle if b.on_disk or b.frame is not None)
        block = next(clean, next(iter(self._kept_idle)))
        del self._kept_idle[block]
        self.device_policy.remove(block)
        return block

    def move_slot(self, block: Block, to: Block) -> None:
        """The slot of a block that nobody else has is `to`'s from now on."""
        to.slot, block.slot = block.slot, None
        self._claims.move_slot(block, to)

    def evict_device(self, block: Block, cause: Cause = Cause.ROOM) -> None:
        """Free an unpinned block's slot, its KV demoted if there is room below."""
        assert block.pins == 0 and block.ranked
        self._unrank(block)
        self.num_device_candidates -= 1
        self.pool.give(self._leave_device(block, cause))

    def _unrank(self, block: Block) -> None:
        if block.ranked:
            self._kept_idle.pop(block, None)
            self.device_policy.remove(block)
            block.ranked = False

    def _leave_device(self, block: Block, cause: Cause = Cause.ROOM) -> int:
        if block.key is not None and block.frame is None:
            self.copy_down(block)
        slot = block.slot
        assert slot is not None
        block.slot = None
        self.chronicle.left(block, TierName.DEVICE, cause)
        if block.frame is not None:
            was_held, block.lent = block.host_held, False
            self._sync_host(block)
            if not (was_held or block.host_held):
                self.host_policy.touch(block, block.use)
        else:
            if block.key is not None and not block.on_disk:
                self.count(TierName.DEVICE, CacheEvent.LOST)
                self.departures.note(block.key, TierName.DEVICE, cause)
            self._forget(block)
        return slot

    # Frames.

    def copy_down(self, block: Block, sparing: Collection[Block] = ()) -> bool:
        """Copy a device block to a host frame; False where none can be had but from `sparing`."""
        assert block.slot is not None and block.frame is None
        frame = self.take_frame(block.scope, sparing)
        if frame is None:
            return False
        started = time.perf_counter()
        copy = self.pool.copy_out(block.slot, frame)
        self.settle_frame(block, frame)
        self._watch(_Copying(copy, (block,), TierName.DEVICE, TierName.HOST, started))
        self.count(TierName.DEVICE, CacheEvent.DEMOTED)
        self.chronicle.came(block, TierName.HOST, TierName.DEVICE)
        return True

    def lift(self, blocks: Sequence[Block], frames: Sequence[Frame]) -> None:
        """Copy pinned host blocks into the slots they were just given; the frames stay theirs."""
        slots = [block.slot for block in blocks if block.slot is not None]
        started = time.perf_counter()
        copy = self.pool.copy_in(frames, slots)
        for block in blocks:
            block.lent = self._host_moves
            self._sync_host(block)
            self.chronicle.came(block, TierName.DEVICE, TierName.HOST)
        self._watch(_Copying(copy, blocks, TierName.HOST, TierName.DEVICE, started))
        self.count(TierName.HOST, CacheEvent.PROMOTED, len(blocks))

    def copy_up(self, block: Block, slot: int) -> None:
        """Copy a host block into a slot that is not its own."""
        assert block.frame is not None
        started = time.perf_counter()
        copy = self.pool.copy_in([block.frame], [slot])
        self._watch(_Copying(copy, (block,), TierName.HOST, TierName.DEVICE, started))

    def _watch(self, copying: _Copying) -> None:
        """Keep the blocks' frames until the copy has arrived."""
        if copying.copy.done():
            self._arrived(copying)
            return
        for block in copying.blocks:
            self.mark_busy(block)
        self._copies.append(copying)

    def _arrived(self, copying: _Copying) -> None:
        elapsed_s = time.perf_counter() - copying.started
        self.chronicle.transfers.observe(
            copying.source, copying.target, len(copying.blocks), elapsed_s
        )

    def settle_frame(self, block: Block, frame: Frame) -> None:
        """The block owns this frame from here on."""
        if block.use is NEVER_USED:
            block.use = Use(time.monotonic(), 1, block.scope)
        block.frame = frame
        block.host_held = False
        self.num_host_blocks += 1
        self.host_policy.insert(block, block.use, None, block.depth)
        self._sync_host(block)
        if self.on_rest is not None:
            self.on_rest(block)

    def take_frame(self, tenant: Hashable, sparing: Collection[Block] = ()) -> Frame | None:
        """A frame for a new owner, evicting a cold host block; one that costs nothing if it can."""
        if self.frames is None:
            return None
        frame = self.frames.take()
        if frame is not None:
            return frame
        self._claims.weigh_frame(tenant, 1)
        block = self._host_victim(sparing)
        self._claims.weigh_frame(tenant, -1)
        if block is None:
            return None
        return self._leave_host(block, self._claims.cause(TierName.HOST, block, tenant))

    def _host_victim(self, sparing: Collection[Block]) -> Block | None:
        """Lent copies first; then cold blocks; then kept ones that the disk has as well."""
        cold = [b for b in self.host_policy.coldest(NUM_VICTIMS_SEEN) if b not in sparing]
        clean = (block for block in cold if block.on_disk or block.slot is not None)
        block = next(iter(self._lent_frames), None) or next(clean, None)
        if block is None and sparing:
            block = next(iter(cold), None)
        elif block is None:
            block = self.host_policy.victim()
            if block is not None:
                return block
            block = next((kept for kept in self._kept_frames if kept.on_disk), None)
        if block is not None:
            self.host_policy.remove(block)
        return block

    def evict_host(self, block: Block, cause: Cause = Cause.ROOM) -> None:
        """Free an unneeded block's frame."""
        assert block.busy == 0 and self.frames is not None
        self.host_policy.remove(block)
        self.frames.give(self._leave_host(block, cause))

    def _leave_host(self, block: Block, cause: Cause = Cause.ROOM) -> Frame:
        assert not block.busy
        frame = self._drop_frame(block)
        block.left_host = cause is Cause.AGE
        self.chronicle.left(block, TierName.HOST, cause)
        if block.slot is None:
            if not block.on_disk:
                self.count(TierName.HOST, CacheEvent.LOST)
                if block.key is not None:
                    self.departures.note(block.key, TierName.HOST, cause)
            elif self.on_left_host is not None:
                self.on_left_host(block)
            self._forget(block)
        return frame

    def free_frame(self, block: Block) -> None:
        """Take the frame from a block whose load failed."""
        assert self.frames is not None
        self.host_policy.remove(block)
        self.frames.give(self._drop_frame(block))

    def _drop_frame(self, block: Block) -> Frame:
        """The frame of a block that the host's policy knows no more."""
        frame = block.frame
        assert frame is not None
        self._kept_frames.pop(block, None)
        self._lent_frames.pop(block, None)
        block.frame = None
        block.host_held = block.lent = False
        self.num_host_blocks -= 1
        return frame

    def mark_busy(self, block: Block) -> None:
        """A thread or a stream uses the frame's bytes: it must not be given away."""
        block.busy += 1
        self._sync_host(block)

    def mark_idle(self, block: Block) -> None:
        block.busy -= 1
        assert block.busy >= 0
        self._sync_host(block)

    def poll_copies(self) -> None:
        """Let go of frames whose copy off the device has arrived."""
        if self._copies:
            waiting = []
            for copying in self._copies:
                if not copying.copy.done():
                    waiting.append(copying)
                    continue
                self._arrived(copying)
                for block in copying.blocks:
                    self.mark_idle(block)
            self._copies = waiting

    def _sync_host(self, block: Block) -> None:
        """Tell the host policy whether the block may leave: not while its frame is in use, nor
        while it is needed and stands nowhere else above the disk. Kept and lent ones have lists of
        their own."""
        if block.frame is None:
            return
        needed = block.busy > 0 or (block.pins > 0 and block.slot is None)
        hold = needed or block.kept or block.lent
        if block.kept or self._kept_frames:
            _list(self._kept_frames, block, block.kept and not needed)
        if block.lent or self._lent_frames:
            _list(self._lent_frames, block, block.lent and not needed and not block.kept)
        if hold and not block.host_held:
            self.host_policy.hold(block)
        elif not hold and block.host_held:
            self.host_policy.release(block, block.use)
        block.host_held = hold

    def _forget(self, block: Block) -> None:
        """The block stands nowhere above the disk any more."""
        if block.key is not None:
            self.index.remove(block)
        elif block.parent is not None:
            self.index.remove_partial(block)

    def forget_everywhere(self, block: Block, cause: Cause = Cause.REQUEST) -> None:
        """Take an unpinned block off the device and the host without demoting it."""
        assert block.pins == 0 and block.busy == 0
        if block.key is not None and not block.on_disk:
            tier = TierName.HOST if block.slot is None else TierName.DEVICE
            self.departures.note(block.key, tier, cause)
        self.detach(block, cause)
        self.discard(block)

    def detach(self, block: Block, cause: Cause = Cause.REQUEST) -> None:
        """Nobody finds the block from now on; who uses it keeps it to the end."""
        self.unkeep(block)
        stood = block.state is BlockState.READY
        if stood and block.slot is not None:
            self.chronicle.left(block, TierName.DEVICE, cause)
        if stood and block.frame is not None:
            self.chronicle.left(block, TierName.HOST, cause)
        self._forget(block)

    def discard(self, block: Block) -> bool:
        """Free what a detached block has and nobody uses; False where its frame is busy.

        A slot in use goes with its last pin.
        """
        if block.busy:
            return False
        if block.frame is not None and (block.pins == 0 or block.slot is not None):
            self.free_frame(block)
        if block.slot is not None and block.pins == 0:
            self._unrank(block)
            self.num_device_candidates -= 1
            self.pool.give(block.slot)
            block.slot = None
        return True

    def check(self, private_slots: int = 0) -> None:
        """Assert that slots and frames are conserved; `private_slots` are running sequences'."""
        blocks = [*self.index, *self.index.iter_partials()]
        slots = [block.slot for block in blocks if block.slot is not None]
        assert len(slots) == len(set(slots)), "two blocks own one slot"
        used = self.pool.num_blocks - self.pool.num_free
        assert used == len(slots) + private_slots, f"{used} slots used, {len(slots)} owned"
        unpinned = sum(block.slot is not None and block.pins == 0 for block in blocks)
        assert unpinned == self.num_device_candidates, "the device policy lost or kept a block"
        framed = [block for block in blocks if block.frame is not None]
        assert len(framed) == self.num_host_blocks
        if self.frames is not None:
            assert self.frames.num_frames - self.frames.num_free == len(framed), "a frame leaked"
        assert len(self._kept_idle) == sum(b.kept and b.ranked and not b.pins for b in blocks)
        for block in blocks:
            stands = block.key is not None and block.state is BlockState.READY
            assert block.kept == (stands and block.key in self.kept_keys), f"{block} is kept?"
            where = block.slot is not None or block.frame is not None
            assert where or block.state is BlockState.COMPUTING, f"{block} stands nowhere"


def _list(blocks: "OrderedDict[Block, None]", block: Block, member: bool) -> None:
    """Make a block a member of a list, in its place if it is one already, or take it out."""
    if member:
        blocks.setdefault(block)
    else:
        blocks.pop(block, None)
