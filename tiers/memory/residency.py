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
from tiers.memory.index import AFTER_USE, NEVER_USED, Below, Block, BlockIndex, BlockState
from tiers.policy import Policy, Use
from tiers.policy.quota import Quotas
from tiers.telemetry.events import EventStream
from tiers.telemetry.misses import Departures
from tiers.tier import Cause, TierName

MIN_LOOKAHEAD = 8  # the coldest host blocks looked at, at least, for one that costs nothing


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
    all others, and the host only once the disk has it; the policies see it as held. A *lent* block
    was promoted from a host tier that gives such copies up first (`keeps_copies`). A *waiting*
    block has a frame that nobody uses, and the disk is to have it and does not.
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
        self.on_left_host: Callable[[Block], None] | None = None  # of clean ones that left
        self.wants_disk: Callable[[Block], bool] = lambda block: False
        self.waiting: OrderedDict[Block, None] = OrderedDict()  # coldest first
        self.num_slots_taken = self.num_frames_taken = 0  # count up, from blocks that had to leave
        self.lookahead = MIN_LOOKAHEAD
        self.num_writing = 0  # blocks that the writer thread reads
        self.host_moves = host_moves
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
            if block.below:
                block.below = AFTER_USE[block.below]
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
            if block.frame is not None and not block.held_below:
                self._sync_host(block)  # a use may have made it worth writing
        elif block.frame is not None:
            self._sync_host(block)

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
        clean = (b for b in self._kept_idle if b.held_below or b.frame is not None)
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
        self.num_slots_taken += 1
        self.chronicle.left(block, TierName.DEVICE, cause)
        if block.frame is not None:
            was_held, block.lent = block.host_held, False
            self._sync_host(block)
            if not (was_held or block.host_held):
                self.host_policy.touch(block, block.use)
                if block in self.waiting:
                    self.waiting.move_to_end(block)
        else:
            if block.key is not None and not block.held_below:
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
            block.lent = self.host_moves
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
        """Lent copies first; then the policy's choice, but not what waits for the disk while others
        nearly as cold do not; then kept blocks that the disk has as well."""
        lent = (block for block in self._lent_frames if block.below is not Below.WRITING)
        block = next(lent, None)
        if block is None and not (sparing or self.waiting or self.num_writing):
            block = self.host_policy.victim()
            if block is not None:
                return block
        if block is None:
            block = self._cold_frame(sparing)
        if block is None and not sparing:
            block = next((kept for kept in self._kept_frames if kept.held_below), None)
        if block is not None:
            self.host_policy.remove(block)
        return block

    def _cold_frame(self, sparing: Collection[Block]) -> Block | None:
        """The coldest block that does not wait for the disk; else one that the device has as well;
        else the end of a prefix, for what leads to it is worth more."""
        cold: list[Block] = []
        for count in (MIN_LOOKAHEAD, self.lookahead):
            cold = [
                block
                for block in self.host_policy.coldest(count + self.num_writing)
                if block.below is not Below.WRITING and block not in sparing
            ]
            for block in cold:
                if block not in self.waiting:
                    return block
            if len(cold) < MIN_LOOKAHEAD:
                break
        on_device = next((block for block in cold if block.slot is not None), None)
        if on_device is not None or not cold:
            return on_device
        return self._last_waiting(cold[0])

    def _last_waiting(self, block: Block) -> Block:
        """The end of a prefix that goes on from this block through others that wait as it does."""
        while block.key is not None:
            following = self.index.children(block.key)
            child = next((b for b in following if b in self.waiting and not b.kept), None)
            if child is None:
                break
            block = child
        return block

    def evict_host(self, block: Block, cause: Cause = Cause.ROOM) -> None:
        """Free an unneeded block's frame."""
        assert block.busy == 0 and self.frames is not None
        self.host_policy.remove(block)
        self.frames.give(self._leave_host(block, cause))

    def _leave_host(self, block: Block, cause: Cause = Cause.ROOM) -> Frame:
        assert not block.busy
        frame = self._drop_frame(block)
        self.num_frames_taken += 1
        self.chronicle.left(block, TierName.HOST, cause)
        if block.slot is None:
            if not block.held_below:
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
        self.waiting.pop(block, None)
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

    def begin_write(self, block: Block) -> None:
        """The writer thread is to read the block's frame; it keeps its place in the order."""
        block.busy += 1
        block.below = Below.WRITING
        self.num_writing += 1
        self._sync_host(block)

    def end_write(self, block: Block, below: Below) -> None:
        """The writer thread is done with the frame."""
        block.busy -= 1
        self.num_writing -= 1
        self.set_below(block, below)

    def set_below(self, block: Block, below: Below) -> None:
        """The tiers below took the block, or gave it up."""
        block.below = below
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
        needed = _is_needed(block)
        hold = needed or block.kept or block.lent
        if block.kept or self._kept_frames:
            _list(self._kept_frames, block, block.kept and not needed)
        if block.lent or self._lent_frames:
            _list(self._lent_frames, block, block.lent and not needed and not block.kept)
        _list(self.waiting, block, not needed and self.wants_disk(block))
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
        if block.key is not None and not block.held_below:
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
        waiting = {b for b in framed if not _is_needed(b) and self.wants_disk(b)}
        assert waiting == set(self.waiting), (
            "a block waits for the disk that should not, or does not"
        )
        assert len(self._kept_idle) == sum(b.kept and b.ranked and not b.pins for b in blocks)
        for block in blocks:
            stands = block.key is not None and block.state is BlockState.READY
            assert block.kept == (stands and block.key in self.kept_keys), f"{block} is kept?"
            where = block.slot is not None or block.frame is not None
            assert where or block.state is BlockState.COMPUTING, f"{block} stands nowhere"


def _is_needed(block: Block) -> bool:
    """Whether a copy uses the frame's bytes, or they are all that somebody who needs the block has.
    What the writer reads is passed over instead, and keeps its place in the order."""
    return block.busy > (block.below is Below.WRITING) or (block.pins > 0 and block.slot is None)


def _list(blocks: "OrderedDict[Block, None]", block: Block, member: bool) -> None:
    """Make a block a member of a list, in its place if it is one already, or take it out."""
    if member:
        blocks.setdefault(block)
    else:
        blocks.pop(block, None)
