"""Who owns which memory: slots of the device pool and frames of the host arena, and their eviction.

Engine thread only. The promoter and the demoter move blocks between tiers; this is the bookkeeping
they share. A block is in the index exactly while it has a slot or a frame, or is being computed.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from tiers.chronicle import CacheEvent, Chronicle
from tiers.departures import Departures
from tiers.device import Copy, DevicePool
from tiers.events import EventStream
from tiers.frames import Frame, FrameArena
from tiers.index import Block, BlockIndex, BlockState
from tiers.lives import Cause
from tiers.policy import Policy, Use
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
    """

    def __init__(
        self,
        index: BlockIndex,
        pool: DevicePool,
        frames: FrameArena | None,
        device_policy: Policy[Block],
        host_policy: Policy[Block],
        stream: EventStream | None = None,
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
        self._copies: list[_Copying] = []

    def count(self, tier: TierName, event: CacheEvent, blocks: int = 1) -> None:
        self.chronicle.count(tier, event, blocks)

    # Pins: who needs a block.

    def pin(self, block: Block) -> None:
        """The block's KV is needed and must not leave."""
        block.pins += 1
        if block.pins == 1:
            if block.ranked:
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
            block.left_disk = False
            block.pins += 1
            if block.pins == 1:
                if block.ranked:
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
                self.pool.give(block.slot)
                block.slot = None
                return
            self.num_device_candidates += 1
            if block.ranked:
                self.device_policy.release(block, use)
            else:
                block.ranked = True
                self.device_policy.insert(block, use, None, block.depth)
        elif block.frame is not None:
            self._sync_host(block)

    # Slots.

    @property
    def num_allocatable(self) -> int:
        """Slots that `take_slot` could hand out now."""
        return self.pool.num_free + self.num_device_candidates

    def take_slot(self) -> int | None:
        """A slot for a new owner, evicting the coldest unreferenced block if need be."""
        slot = self.pool.take()
        if slot is not None:
            return slot
        block = self.device_policy.victim()
        if block is None:
            return None
        self.num_device_candidates -= 1
        block.ranked = False
        return self._leave_device(block)

    def evict_device(self, block: Block, cause: Cause = Cause.ROOM) -> None:
        """Free an unpinned block's slot, its KV demoted if there is room below."""
        assert block.pins == 0 and block.ranked
        self.device_policy.remove(block)
        self.num_device_candidates -= 1
        block.ranked = False
        self.pool.give(self._leave_device(block, cause))

    def _leave_device(self, block: Block, cause: Cause = Cause.ROOM) -> int:
        if block.key is not None and block.frame is None:
            self.copy_down(block)
        slot = block.slot
        assert slot is not None
        block.slot = None
        self.chronicle.left(block, TierName.DEVICE, cause)
        if block.frame is not None:
            self._sync_host(block)
            if not block.host_held:
                self.host_policy.touch(block, block.use)
        else:
            if block.key is not None and not block.on_disk:
                self.count(TierName.DEVICE, CacheEvent.LOST)
                self.departures.note(block.key, TierName.DEVICE, cause)
            self._forget(block)
        return slot

    # Frames.

    def copy_down(self, block: Block) -> bool:
        """Copy a device block to a host frame; False where no frame can be had."""
        assert block.slot is not None and block.frame is None
        frame = self.take_frame()
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
        block.frame = frame
        block.host_held = False
        self.num_host_blocks += 1
        self.host_policy.insert(block, block.use, None, block.depth)
        self._sync_host(block)

    def take_frame(self) -> Frame | None:
        """A frame for a new owner, evicting a cold host block; one that costs nothing if it can."""
        if self.frames is None:
            return None
        frame = self.frames.take()
        if frame is not None:
            return frame
        block = self._host_victim()
        if block is None:
            return None
        return self._leave_host(block)

    def _host_victim(self) -> Block | None:
        for block in self.host_policy.coldest(NUM_VICTIMS_SEEN):
            if block.on_disk or block.slot is not None:
                self.host_policy.remove(block)
                return block
        return self.host_policy.victim()

    def evict_host(self, block: Block, cause: Cause = Cause.ROOM) -> None:
        """Free an unneeded block's frame."""
        assert not block.host_held and self.frames is not None
        self.host_policy.remove(block)
        self.frames.give(self._leave_host(block, cause))

    def _leave_host(self, block: Block, cause: Cause = Cause.ROOM) -> Frame:
        frame = block.frame
        assert frame is not None and not block.busy
        block.frame = None
        block.host_held = False
        self.num_host_blocks -= 1
        self.chronicle.left(block, TierName.HOST, cause)
        if block.slot is None:
            if not block.on_disk:
                self.count(TierName.HOST, CacheEvent.LOST)
                if block.key is not None:
                    self.departures.note(block.key, TierName.HOST, cause)
            self._forget(block)
        return frame

    def free_frame(self, block: Block) -> None:
        """Take the frame from a block whose load failed."""
        assert block.frame is not None and self.frames is not None
        self.host_policy.remove(block)
        self.frames.give(block.frame)
        self.num_host_blocks -= 1
        block.frame = None
        block.host_held = False

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
        while it is needed and stands nowhere else above the disk."""
        if block.frame is None:
            return
        hold = block.busy > 0 or (block.pins > 0 and block.slot is None)
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
        if block.slot is not None:
            self.device_policy.remove(block)
            self.num_device_candidates -= 1
            block.ranked = False
            self.pool.give(block.slot)
            block.slot = None
            self.chronicle.left(block, TierName.DEVICE, cause)
        if block.frame is not None:
            self.free_frame(block)
            self.chronicle.left(block, TierName.HOST, cause)
        self._forget(block)

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
        for block in blocks:
            where = block.slot is not None or block.frame is not None
            assert where or block.state is BlockState.COMPUTING, f"{block} stands nowhere"
