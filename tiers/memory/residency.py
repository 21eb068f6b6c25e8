"""Both memory tiers together: which blocks are needed, and which leave to make room.

Engine thread only. A block is in the index exactly while it has a slot or a frame, or is being
computed. Demotion is in `tiers.transfer.demotion`, promotion in `tiers.transfer.promotion`; their
common part is here.
"""

import time
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from tiers.blocks.frames import Arena, Frame, FrameArena
from tiers.blocks.keys import PrefixKey
from tiers.blocks.part import Part
from tiers.errors import CopyFailed
from tiers.memory.block import NEVER_USED, Below, Block, BlockState, DeviceState, HostState
from tiers.memory.claims import Claims
from tiers.memory.copies import Copies
from tiers.memory.counters import MemoryCounters
from tiers.memory.device import DevicePool
from tiers.memory.device_tier import DeviceTier
from tiers.memory.host_tier import HostTier
from tiers.memory.index import BlockIndex
from tiers.memory.write_queue import WriteQueue
from tiers.policy.policy import Policy, Use
from tiers.policy.quota import Quotas
from tiers.telemetry.events import CacheEvent, EventStream
from tiers.telemetry.misses import EvictedKeys
from tiers.tier import Cause, TierName

_, FILLING, IN_USE, EVICTABLE, _ = DeviceState
REFUSED = Below.REFUSED


class Residency:
    """Each call changes one fact about a block, and the tiers make the resulting transitions.

    `MemoryCounters` is told of every move.
    """

    def __init__(
        self,
        index: BlockIndex,
        pool: DevicePool,
        frames: Arena | None,
        device_policy: Policy[Block],
        host_policy: Policy[Block],
        stream: EventStream | None = None,
        *,
        host_moves: bool = False,
        quotas: Mapping[TierName, Quotas] | None = None,
    ) -> None:
        num_frames = frames.num_frames if frames is not None else 0
        self.index = index
        self.pool = pool
        self._reach = pool.layout.reach
        self.frames = frames
        self.queue = WriteQueue()
        self.device = DeviceTier(pool, device_policy)
        self.host = HostTier(index, frames, host_policy, self.queue)
        self.counters = MemoryCounters(
            pool.layout.nbytes,
            stream or EventStream(),
            num_slots=pool.num_slots,
            num_frames=num_frames * pool.layout.num_lesser,
        )
        self.copies = Copies(self.host, self.counters)
        self.evicted_keys = EvictedKeys()
        self.pinned_keys: Container[PrefixKey] = ()
        self.demote: Callable[..., bool] = lambda block, **_: False  # to a frame, if it gets one
        self.has_below = False  # whether there are tiers below memory
        self.skips: Callable[[Block], bool] = lambda block: False  # the write policy: not to disk
        self.on_lost: Callable[[Block], None] = lambda block: None
        self.on_left_host: Callable[[Block], None] | None = None  # of clean ones that left
        self.num_slots_taken = self.num_frames_taken = 0  # count up, from blocks that had to leave
        self.num_moved = 0  # counts up: blocks that got another slot while sequences may use them
        self.host_moves = host_moves
        # Residencies that share one order of eviction may have to give up each other's blocks.
        self.holder_of: Callable[[Block], Residency] = lambda block: self
        self.sharers: Collection[Residency] = (self,)
        self._claims = Claims(quotas or {}, pool.layout.nbytes)

    @property
    def tiers(self) -> list[TierName]:
        """The memory tiers with room for a block, hottest first."""
        sizes = {TierName.DEVICE: self.pool.num_blocks, TierName.HOST: self.frames is not None}
        return [tier for tier, size in sizes.items() if size]

    def count(self, tier: TierName, event: CacheEvent, blocks: int = 1) -> None:
        self.counters.count(tier, event, blocks)

    # Who needs a block.

    def acquire(self, block: Block) -> None:
        """Marks the block as needed, so that it is not evicted."""
        block.ref_count += 1
        if block.ref_count == 1:
            if block.device >= EVICTABLE:
                self.device.use(block)
            elif block.frame is not None:
                self.host.sync(block)

    def acquire_run(self, blocks: Sequence[Block]) -> bool:
        """Acquire blocks that were hit; the hot path of a lookup. True: all stand on the device and
        nobody else uses them, as mostly."""
        self.counters.reused(blocks)
        evictable: list[Block] = []
        for block in blocks:
            block.hits += 1
            if block.below is REFUSED:
                block.below = Below.ABSENT
            if block.device is EVICTABLE:
                block.ref_count = 1
                evictable.append(block)
            else:
                self.acquire(block)
        self.device.use_run(evictable)
        return len(evictable) == len(blocks)

    def release(self, block: Block, use: Use) -> None:
        """Releases one need of the block.

        Release a chain tail first, so that a leaf leaves before its parent.
        """
        block.ref_count -= 1
        assert block.ref_count >= 0, f"{block} was released once too often"
        if block.ref_count:
            return
        block.use = use
        if block.slot is not None:
            if block.key is None and block.parent is None:
                self.device.forget(block)
                self._claims.release_slot(block)
                self.pool.give(self.device.leave(block))
                return
            if block.device is FILLING:
                self._claims.release_slot(block)
            self.device.idle(block, use)
            if block.frame is not None and not block.held_below:
                self.host.sync(block)  # a use may have made it worth writing
        elif block.frame is not None:
            if block.key is None and block.parent is None and not block.busy:
                self.host.free(block)  # it was detached, and this was its last user
            else:
                self.host.sync(block)

    def release_run(self, blocks: Iterable[Block], use: Use) -> None:
        """Releases a sequence's blocks, tail first; optimised for blocks that nobody else has."""
        run: list[Block] = []
        for block in blocks:
            alone = block.ref_count == 1 and block.key is not None
            if alone and block.device is IN_USE and not block.pinned:
                block.ref_count = 0
                block.use = use
                run.append(block)
                continue
            self._idle(run, use)
            run.clear()
            self.release(block, use)
        self._idle(run, use)

    def release_prefix(self, blocks: Sequence[Block], use: Use) -> None:
        """Releases the blocks of a prefix, tail first. If the layout has windows, this use needed
        those of blocks that it computed, and of the last ones before them."""
        reach = self._reach
        passed: Sequence[Block] = ()
        if reach:
            numbers = (n for n, block in enumerate(blocks) if block.use is NEVER_USED)
            passed = blocks[: max(0, next(numbers, len(blocks)) - reach)]
        self.release_run(reversed(blocks), use)
        if passed:
            use = replace(use, windows=False)
            for block in passed:
                if not block.ref_count:
                    block.use = use
                    self.device.passed(block)
                    self.host.sync(block)

    def _idle(self, blocks: list[Block], use: Use) -> None:
        self.device.idle_run(blocks, use)
        for block in blocks:
            if block.frame is not None and not block.held_below:
                self.host.sync(block)

    # What an operator pinned.

    def entered(self, block: Block) -> bool:
        """The block came into the index with its KV; whether it is pinned."""
        if block.key in self.pinned_keys:
            self.pin(block)
        return block.pinned

    def ready(self, key: PrefixKey) -> Block | None:
        """The block with this key, if it is complete."""
        block = self.index.get(key)
        return block if block is not None and block.state is BlockState.READY else None

    def pin(self, block: Block) -> None:
        """Pins the block: it leaves after all others, and only if a lower tier has it too.

        The block pinned longest ago leaves first, so pin a prefix tail first.
        """
        if block.pinned:
            self.device.pin_again(block)
            return
        block.pinned = True
        self.device.pin(block)
        self.host.sync(block)

    def unpin(self, block: Block) -> None:
        """Removes the block's pin."""
        if block.pinned:
            block.pinned = False
            self.device.unpin(block)
            self.host.sync(block)

    # Slots.

    @property
    def num_allocatable(self) -> int:
        """The number of whole slots that `take_slot` could return now."""
        return self.device.num_allocatable

    def take_slot(self, block: Block, tenant: Hashable, *, lesser: bool = False) -> int | None:
        """Gives the block a slot, evicting the coldest unreferenced block if necessary. With
        `lesser`, it is one for a block without its windows."""
        self._claims.claim_slot(block, tenant)
        slot = self.pool.take(lesser=lesser)
        if slot is None:
            slot = self._free_slot(tenant, lesser)
        if slot is None:
            self._claims.release_slot(block)
            return None
        self.device.settle(block, slot)
        return slot

    def _free_slot(self, tenant: Hashable, lesser: bool) -> int | None:
        """A slot for a new owner, where none is free. Windows that no use needed leave before
        blocks."""
        slot = None
        while slot is None:
            if self._lessen_slot():
                slot = self.pool.take(lesser=lesser)
                continue
            victim = self.device.victim()
            if victim is None:
                return None
            cause = self._claims.cause(TierName.DEVICE, victim, tenant)
            left = self._leave_device(victim, cause)
            slot = self.pool.reuse(left, lesser=lesser)
            if slot is None and self._gather(left):
                slot = self.pool.take()
        return slot

    def _lessen_slot(self) -> bool:
        """Make room on the device by giving up windows that no use needed. False if there are
        none."""
        block = self.device.next_passed()
        while block is not None and not self._may_lose_windows(block):
            block = self.device.next_passed()
        if block is None:
            return False
        assert block.slot is not None
        if self.pool.num_lesser_free:
            self._move_down(block)
        else:
            self.pool.lessen(block.slot)
            self.device.lessened(block)
        return True

    def _may_lose_windows(self, block: Block) -> bool:
        """Whether the device may give up the block's windows: the host or a lower tier has them,
        or, if there is none, nobody else could."""
        if block.held_below or self.frames is None:
            return True
        if block.frame is None:
            return self.demote(block)
        return block.frame.part is Part.WHOLE

    def _move_down(self, block: Block) -> bool:
        """Move a block that nobody uses to a free lesser slot. False if the copy failed."""
        slot = self.pool.take(lesser=True)
        assert slot is not None and block.slot is not None
        try:
            self.pool.move(block.slot, slot)
        except CopyFailed as error:
            self.pool.give(slot)
            self.copies.failed(TierName.DEVICE, error)
            return False
        self._change_slot(block, slot)
        return True

    def _change_slot(self, block: Block, slot: int) -> None:
        assert block.slot is not None
        self.counters.moved_slot(block.slot, slot)
        self.pool.give(self.device.moved(block, slot))

    def _gather(self, slot: int) -> bool:
        """After a lesser slot was given back, empty the slot that it is part of, if nobody uses the
        other parts and they have room elsewhere. False if it could not be done."""
        blocks = self.device.beside(slot)
        if not blocks or self.pool.num_lesser_free < self.pool.num_lesser:
            return False
        self.pool.take_last(slot)
        moved = [self._move_down(block) for block in blocks]
        return all(moved)

    def widen(self, block: Block) -> bool:
        """Move a block to a whole slot, with room for its windows. It may be in use: sequences that
        have its slot in their tables must look again, see `num_moved`. False if there is none.
        Raises CopyFailed."""
        assert block.slot is not None and block.ref_count, f"{block} may leave"
        if not self.pool.is_lesser(block.slot):
            return True
        block.busy += 1  # its frame has its windows
        self.host.sync(block)
        slot = self.pool.take()
        if slot is None:
            slot = self._free_slot(block.scope, lesser=False)
        block.busy -= 1
        self.host.sync(block)
        if slot is None:
            return False
        try:
            self.pool.move(block.slot, slot)
        except CopyFailed:
            self.pool.give(slot)
            raise
        self._change_slot(block, slot)
        self.num_moved += 1
        return True

    def take_back(self, block: Block) -> None:
        """Frees the slot that a block was just given and that was never filled."""
        self._claims.release_slot(block)
        self.pool.give(self.device.leave(block))
        self.host.sync(block)

    def lacks_slot(self, block: Block) -> bool:
        """Whether the block has no whole slot."""
        return block.slot is None or self.pool.is_lesser(block.slot)

    def hand_over(self, block: Block, to: Block) -> None:
        """The slot of a block that nobody else has is `to`'s from now on."""
        self.device.hand_over(block, to)
        self._claims.move_slot(block, to)
        if to.frame is not None and to.frame.part is Part.LASTING:
            self._regained_windows(to)
        self.host.sync(to)
        self._drop_lesser_frame(to)

    def complete(self, block: Block, whole: Block) -> None:
        """A slot that lacks windows gets them from that of the block's equal, or becomes that one.
        Raises CopyFailed."""
        assert block.slot is not None and whole.slot is not None and whole.slot_whole
        if self.pool.is_lesser(block.slot):
            self.counters.moved_slot(block.slot, whole.slot)
            self.device.exchange(block, whole)
            self.num_moved += 1
        else:
            self.pool.copy_rows(whole.slot, block.slot, self.pool.layout.block_size)
        block.slot_whole = True
        self._regained_windows(block)
        self._drop_lesser_frame(block)

    def _regained_windows(self, block: Block) -> None:
        """The windows of a block were computed again, so the tiers below may lack them."""
        if self.pool.layout.apart:
            self.queue.dropped(block)

    def _drop_lesser_frame(self, block: Block) -> None:
        """Give up a frame that has less than the slot: a copy down makes a whole one."""
        frame = block.frame
        if frame is not None and frame.part is Part.LASTING and block.slot_whole and not block.busy:
            self.evict_host(block, Cause.REDUNDANT)

    def evict_device(self, block: Block, cause: Cause = Cause.ROOM) -> None:
        """Frees an unneeded block's slot, and demotes its KV if there is room below."""
        assert block.ref_count == 0, f"{block} is in use"
        self.device.forget(block)
        self.pool.give(self._leave_device(block, cause))

    def _leave_device(self, block: Block, cause: Cause) -> int:
        """The slot of a block that the device's policy has forgotten."""
        if block.key is not None and block.frame is None:
            self.demote(block)
        self.counters.left(block, TierName.DEVICE, cause)
        slot = self.device.leave(block)
        self.num_slots_taken += 1
        if block.frame is not None:
            self.host.left_device(block)
        else:
            self._leave_memory(block, TierName.DEVICE, cause)
        return slot

    # Frames.

    def settle_frame(self, block: Block, frame: Frame) -> None:
        """The block owns this frame from here on."""
        if block.use is NEVER_USED:
            block.use = Use(time.monotonic(), 1, block.scope)
        self.host.settle(block, frame)

    def take_frame(
        self, tenant: Hashable, sparing: Collection[Block] = (), *, lesser: bool = False
    ) -> Frame | None:
        """A frame for a new owner, evicting a cold host block; one that costs nothing if it can.
        Windows that no use needed leave before blocks. With `lesser`, it is one for a block without
        windows."""
        if self.frames is None:
            return None
        frame = self.frames.take(lesser)
        while frame is None:
            if self._lessen(sparing):
                frame = self.frames.take(lesser)
                continue
            self._claims.weigh_frame(tenant, 1)
            block = self.host.victim(sparing)
            if block is None and not sparing:
                block = self._pinned_victim()
            self._claims.weigh_frame(tenant, -1)
            if block is None:
                return None
            cause = self._claims.cause(TierName.HOST, block, tenant)
            frame = self.frames.reuse(self.holder_of(block)._leave_host(block, cause), lesser)
        return frame

    def _lessen(self, sparing: Collection[Block]) -> bool:
        """Make room on the host by giving up windows that no use needed. False if there are
        none."""
        frames = self.frames
        if not isinstance(frames, FrameArena) or frames.num_lesser == 1:
            return False
        block = self.host.passed(may_lose=not self.has_below)
        if block is None or block in sparing:
            return False
        frame = block.frame
        assert frame is not None
        if not frames.has_lesser:
            self._move_frame(block, frames.lessen(frame))
            return True
        lesser = frames.take(lesser=True)
        assert lesser is not None
        lesser.buffer[:] = frame.buffer[: len(lesser.buffer)]
        self._move_frame(block, lesser)
        frames.give(frame)
        return True

    def enlarge(self, block: Block, sparing: Collection[Block]) -> bool:
        """Give a block on the host room for its windows. False if there is none."""
        frame = block.frame
        assert frame is not None and frame.part is Part.LASTING
        if not frame.lesser:
            return True
        if block.busy:
            return False
        whole = self.take_frame(block.scope, sparing)
        if whole is None:
            return False
        assert block.frame is frame and self.frames is not None, f"{block} lost its frame"
        whole.part = Part.LASTING
        whole.buffer[: len(frame.buffer)] = frame.buffer
        self._move_frame(block, whole)
        self.frames.give(frame)
        return True

    def _move_frame(self, block: Block, frame: Frame) -> None:
        """The block's bytes are in another frame from here on."""
        assert block.frame is not None
        self.counters.moved_frame(block.frame.number, frame.number)
        block.frame = frame
        self.host.sync(block)

    def give_frame(self, frame: Frame) -> None:
        """Gives back a frame that was taken and got no owner."""
        assert self.frames is not None
        frame.vacate()
        self.frames.give(frame)

    def _pinned_victim(self) -> Block | None:
        """A pinned block to leave the host: none of an owner within its share."""

        def may_lose(block: Block) -> bool:
            assert self.frames is not None and block.frame is not None
            return self._claims.may_lose_frame(block) and self.frames.can_reuse(block.frame)

        victims = (each.host.pinned_victim(may_lose) for each in self.sharers)
        return next((block for block in victims if block is not None), None)

    def evict_host(self, block: Block, cause: Cause = Cause.ROOM) -> None:
        """Free an unneeded block's frame."""
        assert self.frames is not None
        self.host.policy.remove(block)
        self.frames.give(self._leave_host(block, cause))

    def _leave_host(self, block: Block, cause: Cause) -> Frame:
        """The frame of a block that the host's policy has forgotten."""
        self.counters.left(block, TierName.HOST, cause)
        frame = self.host.leave(block)
        self.num_frames_taken += 1
        if block.slot is None:
            if block.held_below and self.on_left_host is not None:
                self.on_left_host(block)
            self._leave_memory(block, TierName.HOST, cause)
        return frame

    # Out of memory.

    def _leave_memory(self, block: Block, tier: TierName, cause: Cause) -> None:
        """The block's last copy in memory was in `tier`."""
        if block.key is not None and not block.held_below:
            skipped = self.skips(block) and not block.pinned
            self.count(tier, CacheEvent.SKIPPED if skipped else CacheEvent.LOST)
            if not skipped:
                self.on_lost(block)
            self.evicted_keys.note(block.key, tier, cause)
        self._forget(block)

    def _forget(self, block: Block) -> None:
        """Nobody finds the block any more."""
        if block.key is not None:
            self.index.remove(block)
        elif block.parent is not None:
            self.index.remove_partial(block)

    def forget_everywhere(self, block: Block, cause: Cause = Cause.REQUEST) -> None:
        """Removes an unneeded block from the device and the host without demoting it."""
        assert block.ref_count == 0 and block.busy == 0, f"{block} is in use"
        if block.key is not None and not block.held_below:
            tier = TierName.HOST if block.slot is None else TierName.DEVICE
            self.evicted_keys.note(block.key, tier, cause)
        self.detach(block, cause)
        self.discard(block)

    def detach(self, block: Block, cause: Cause = Cause.REQUEST) -> None:
        """Remove the block from the index; current users keep it until they finish."""
        self.unpin(block)
        if block.state is BlockState.READY:
            if block.slot is not None:
                self.counters.left(block, TierName.DEVICE, cause)
            if block.frame is not None:
                self.counters.left(block, TierName.HOST, cause)
        self._forget(block)
        self.host.sync(block)

    def discard(self, block: Block) -> bool:
        """Frees a detached block's unused slot and frame. Returns False if its frame is busy.

        A slot in use is freed with its last reference.
        """
        if block.busy:
            return False
        if block.frame is not None and (block.ref_count == 0 or block.slot is not None):
            self.host.free(block)
        if block.slot is not None and block.ref_count == 0:
            self.device.forget(block)
            self.pool.give(self.device.leave(block))
        return True

    def check(self, private_slots: int = 0, detached: Iterable[Block] = ()) -> None:
        """Assert that slots and frames are conserved and that every state is what it should be;
        `private_slots` are running sequences', `detached` blocks have users left."""
        blocks = [*self.index, *self.index.iter_partials(), *detached]
        self.device.check(blocks, private_slots)
        self.host.check(blocks)
        self.queue.check(blocks)
        for block in blocks:
            stands = block.key is not None and block.state is BlockState.READY
            assert block.pinned == (stands and block.key in self.pinned_keys), f"{block} is pinned?"
            where = block.slot is not None or block.host is not HostState.ABSENT
            assert where or block.state is BlockState.COMPUTING, f"{block} stands nowhere"
