"""Both memory tiers together: which blocks are needed, and which leave to make room.

Engine thread only. A block is in the index exactly while it has a slot or a frame, or is being
computed. Demotion is in `tiers.transfer.demotion`, promotion in `tiers.transfer.promotion`; their
common part is here.
"""

import time
from collections.abc import Collection, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from tiers.blocks.frames import Arena, Frame
from tiers.blocks.keys import PrefixKey
from tiers.blocks.part import Part
from tiers.memory.block import NEVER_USED, Below, Block, BlockState, DeviceState, HostState
from tiers.memory.claims import Claims
from tiers.memory.copies import Copies
from tiers.memory.counters import MemoryCounters
from tiers.memory.device import DevicePool
from tiers.memory.device_tier import DeviceTier
from tiers.memory.evictor import Evictor
from tiers.memory.host_tier import HostTier
from tiers.memory.index import BlockIndex
from tiers.memory.room import DeviceRoom, HostRoom
from tiers.memory.write_queue import WriteQueue
from tiers.policy.policy import Policy, Use
from tiers.policy.quota import Quotas
from tiers.telemetry.events import EventStream
from tiers.tier import Cause, TierName

_, FILLING, IN_USE, EVICTABLE, _ = DeviceState
REFUSED = Below.REFUSED


class Residency:
    """Each call changes one fact about a block, and the tiers make the resulting transitions.
    `MemoryCounters` is told of every move."""

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
        self.evictor = Evictor(index, self.device, self.host, self.counters)
        self.pinned_keys: Container[PrefixKey] = ()
        self.host_moves = host_moves
        self._claims = Claims(quotas or {}, pool.layout.nbytes)
        both = self._claims, self.copies, self.counters, self.evictor
        self.device_room = DeviceRoom(pool, self.device, self.host, *both)
        self.host_room = HostRoom(frames, self.host, *both) if frames is not None else None

    @property
    def tiers(self) -> list[TierName]:
        """The memory tiers with room for a block, hottest first."""
        sizes = {TierName.DEVICE: self.pool.num_blocks, TierName.HOST: self.frames is not None}
        return [tier for tier, size in sizes.items() if size]

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
        """Releases one need of the block. Release a chain tail first: leaves leave first."""
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
                    self.device.passed.sync(block)
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
        """Pins the block: it leaves after all others, and only if a lower tier has it too. The
        block pinned longest ago leaves first, so pin a prefix tail first."""
        if block.pinned:
            self.device.pin_again(block)
            return
        block.pinned = True
        self.device.pin(block)
        self.host.sync(block)

    def unpin(self, block: Block) -> None:
        if block.pinned:
            block.pinned = False
            self.device.unpin(block)
            self.host.sync(block)

    # Slots.

    def take_slot(self, block: Block, tenant: Hashable, *, lesser: bool = False) -> int | None:
        """Gives the block a slot, evicting the coldest unreferenced block if necessary. With
        `lesser`, it is one for a block without its windows."""
        self._claims.claim_slot(block, tenant)
        slot = self.device_room.take(tenant, lesser=lesser)
        if slot is None:
            self._claims.release_slot(block)
            return None
        self.device.settle(block, slot)
        self.counters.took_slot(slot)
        return slot

    def take_back(self, block: Block) -> None:
        """Frees the slot that a block was just given and that was never filled."""
        self._claims.release_slot(block)
        self.pool.give(self.device.leave(block))
        self.host.sync(block)

    def lacks_slot(self, block: Block) -> bool:
        """Whether the block has no whole slot."""
        return block.slot is None or self.pool.places.is_lesser(block.slot)

    def hand_over(self, block: Block, to: Block) -> None:
        """The slot of a block that nobody else has is `to`'s from now on."""
        self.device.hand_over(block, to)
        self._claims.move_slot(block, to)
        if to.frame is not None and to.frame.part is Part.LASTING:
            self._regained_windows(to)
        self.host.sync(to)
        self._drop_lesser_frame(to)

    def complete(self, block: Block, whole: Block) -> None:
        """A slot without windows gets those of the block's equal. Raises CopyFailed."""
        assert block.slot is not None and whole.slot is not None and whole.slot_whole
        if self.pool.places.is_lesser(block.slot):
            self.device_room.exchange(block, whole)
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
        self.pool.give(self.evictor.off_device(block, cause))

    # Frames.

    def settle_frame(self, block: Block, frame: Frame) -> None:
        """The block owns this frame from here on."""
        if block.use is NEVER_USED:
            block.use = Use(time.monotonic(), block.scope)
        self.host.settle(block, frame)

    def take_frame(
        self, tenant: Hashable, sparing: Collection[Block] = (), *, lesser: bool = False
    ) -> Frame | None:
        """A frame for a new owner, evicting a cold host block; one that costs nothing if it can.
        With `lesser`, it is one for a block without windows."""
        return self.host_room.take(tenant, sparing, lesser=lesser) if self.host_room else None

    def give_frame(self, frame: Frame) -> None:
        """Gives back a frame that was taken and got no owner."""
        assert self.frames is not None
        frame.vacate()
        self.frames.give(frame)

    def evict_host(self, block: Block, cause: Cause = Cause.ROOM) -> None:
        assert self.frames is not None
        self.host.policy.remove(block)
        self.frames.give(self.evictor.off_host(block, cause))

    # Out of memory.

    def forget_everywhere(self, block: Block, cause: Cause = Cause.REQUEST) -> bool:
        """Removes an unneeded block from the device and the host without demoting it. False: its
        frame is busy, so that the caller discards it later."""
        assert block.ref_count == 0, f"{block} is in use"
        if block.key is not None and not block.held_below:
            tier = TierName.HOST if block.slot is None else TierName.DEVICE
            self.evictor.evicted_keys.note(block.key, tier, cause)
        self.detach(block, cause)
        return self.discard(block)

    def detach(self, block: Block, cause: Cause = Cause.REQUEST) -> None:
        """Remove the block from the index; current users keep it until they finish."""
        self.unpin(block)
        if block.state is BlockState.READY:
            if block.slot is not None:
                self.counters.left(block, TierName.DEVICE, cause)
            if block.frame is not None:
                self.counters.left(block, TierName.HOST, cause)
        self.index.forget(block)
        self.host.sync(block)

    def discard(self, block: Block) -> bool:
        """Frees a detached block's unused slot and frame. Returns False if its frame is busy. A
        slot in use is freed with its last reference."""
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
