"""The host as a tier: the frame and state of each block, and which block leaves next.

Only this module changes `Block.host`. Engine thread only.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection

from tiers.blocks.frames import Arena, Frame
from tiers.blocks.part import Part
from tiers.memory.block import HOST_MOVES, Below, Block, HostState
from tiers.memory.index import BlockIndex
from tiers.memory.passed import PassedWindows
from tiers.memory.write_queue import WriteQueue
from tiers.policy.policy import Policy

MIN_LOOKAHEAD = 8  # coldest blocks searched, at least, for one that costs nothing to evict

ABSENT, IN_USE, EVICTABLE, DUPLICATED, PINNED = HostState


class HostTier:
    """Invariants: a block has a frame exactly while it is not ABSENT. The policy knows the block
    then, and may choose it only while it is EVICTABLE."""

    def __init__(
        self, index: BlockIndex, frames: Arena | None, policy: Policy[Block], queue: WriteQueue
    ) -> None:
        self.frames = frames
        self.policy = policy
        self.num_blocks = 0
        self.lookahead = MIN_LOOKAHEAD
        self.has_below = False  # whether there are tiers below memory
        self._index = index
        self._queue = queue
        self.queues: Collection[WriteQueue] = (queue,)  # of all tiers that share the policy
        self._lifted: OrderedDict[Block, None] = OrderedDict()  # also on the device, oldest first
        self._pinned: OrderedDict[Block, None] = OrderedDict()  # PINNED
        self._second_copies: set[Block] = set()  # DUPLICATED, unless also IN_USE or PINNED
        self._duplicated: OrderedDict[Block, None] = OrderedDict()  # DUPLICATED, oldest first
        self._cuts = frames is not None and frames.num_lesser > 1
        self.passed = PassedWindows(self._has_spare_windows)

    def settle(self, block: Block, frame: Frame) -> None:
        """Give the block this frame, and the state that it should have."""
        self._move(block, EVICTABLE)
        block.frame = frame
        self.num_blocks += 1
        self.policy.insert(block, block.use)
        self.sync(block)

    def sync(self, block: Block) -> None:
        """Recompute the block's state after something about it may have changed."""
        old = block.host
        if old is ABSENT:
            return
        new = _state(block, block in self._second_copies)
        if new is not old:
            self._unlist(block)
            if old is EVICTABLE:
                self.policy.hold(block)
            self._move(block, new)
            if new is EVICTABLE:
                self.policy.release(block, block.use)
            elif new is PINNED:
                self._pinned[block] = None
            elif new is DUPLICATED:
                self._duplicated[block] = None
        self._queue.sync(block)
        if self._cuts and not block.use.windows:
            self.passed.sync(block)

    def _has_spare_windows(self, block: Block) -> bool:
        idle = block.host is EVICTABLE and not block.busy and not block.use.windows
        here = block.frame is not None and block.frame.part is Part.WHOLE and block.slot is None
        return self._cuts and idle and here

    def left_device(self, block: Block) -> None:
        """Take in that the block has left the device, where it was used until now."""
        was_evictable = block.host is EVICTABLE
        self._lifted.pop(block, None)
        self._second_copies.discard(block)
        self.sync(block)
        if was_evictable and block.host is EVICTABLE:
            self.policy.touch(block, block.use)
            self._queue.used(block)

    def lifted(self, block: Block, *, leaves_first: bool) -> None:
        """Take in that the block is being copied to the device, so that its frame is a second copy.
        `leaves_first`: second copies are not kept, and this one leaves before other blocks."""
        if leaves_first:
            self._second_copies.add(block)
        self.sync(block)
        self._lifted[block] = None

    def victim(self, sparing: Collection[Block]) -> Block | None:
        """Choose the block that leaves next and make the policy forget it.

        Duplicated blocks go first. Then comes the policy's choice, but a block waiting for the disk
        is passed over while another, nearly as cold, does not wait. Pinned blocks go last, by
        `pinned_victim`. The caller takes the frame with `leave`.
        """
        block = next((b for b in self._duplicated if b.below is not Below.WRITING), None)
        if block is None and not (sparing or any(self.queues) or self._num_writing):
            block = self.policy.victim()
            if block is not None:
                return block
        if block is None:
            block = self._cold(sparing)
        if block is not None:
            self.policy.remove(block)
        return block

    def pinned_victim(self, may_lose: Callable[[Block], bool]) -> Block | None:
        """Choose a pinned block that a lower tier also has, and make the policy forget it."""
        clean = (b for b in self._pinned if b.held_below and may_lose(b))
        block = next(clean, None)
        if block is not None:
            self.policy.remove(block)
        return block

    def leave(self, block: Block) -> Frame:
        """Move a block that the policy has forgotten to ABSENT. Returns its frame."""
        frame = block.frame
        assert frame is not None and not block.busy, f"the frame of {block} is in use"
        self._unlist(block)
        self._move(block, ABSENT)
        block.frame = None
        frame.vacate()
        self.passed.forget(block)
        self._second_copies.discard(block)
        self._lifted.pop(block, None)
        self.num_blocks -= 1
        self._queue.sync(block)
        return frame

    def free(self, block: Block) -> None:
        assert self.frames is not None
        self.policy.remove(block)
        self.frames.give(self.leave(block))

    def _cold(self, sparing: Collection[Block]) -> Block | None:
        """The coldest block that is not waiting for the disk.

        If all wait: one that the device also has, either among the coldest or among those copied
        up. Otherwise the end of a prefix, because the blocks before it are worth more. Only this
        last choice loses KV.
        """
        cold: list[Block] = []
        for count in (MIN_LOOKAHEAD, self.lookahead):
            cold = [
                block
                for block in self.policy.coldest(count + self._num_writing)
                if block.below is not Below.WRITING and block not in sparing
            ]
            for block in cold:
                if block.below is not Below.WAITING:
                    return block
            if len(cold) < MIN_LOOKAHEAD:
                break
        on_device = next((block for block in cold if block.slot is not None), None)
        if on_device is not None or not cold:
            return on_device
        return self._lifted_copy(sparing) or self._last_waiting(cold[0])

    def _lifted_copy(self, sparing: Collection[Block]) -> Block | None:
        """The first of the blocks copied up whose frame duplicates the device's copy."""
        while self._lifted:
            block = next(iter(self._lifted))
            if block.slot is not None and block.host is IN_USE:
                return None  # it is still being copied, and so are those behind it
            del self._lifted[block]
            idle = block.host is EVICTABLE and not block.busy
            if idle and block.slot is not None and block not in sparing:
                return block
        return None

    def _last_waiting(self, block: Block) -> Block:
        """The last block that continues this one through blocks that also wait."""
        while block.key is not None:
            following = self._index.children(block.key)
            child = next((b for b in following if b.below is Below.WAITING and not b.pinned), None)
            if child is None:
                break
            block = child
        return block

    @property
    def _num_writing(self) -> int:
        return sum(queue.num_writing for queue in self.queues)

    def _unlist(self, block: Block) -> None:
        if block.host is PINNED:
            del self._pinned[block]
        elif block.host is DUPLICATED:
            del self._duplicated[block]

    def _move(self, block: Block, to: HostState) -> None:
        assert to in HOST_MOVES[block.host], f"{block} cannot become {to.name} on the host"
        block.host = to

    def check(self, blocks: list[Block]) -> None:
        """Assert that frames are conserved and that each block is in the state it should have."""
        framed = [block for block in blocks if block.frame is not None]
        assert len(framed) == self.num_blocks
        if self.frames is not None:
            assert self.frames.num_taken == len(framed), "a frame leaked"
        for block in blocks:
            assert (block.frame is None) == (block.host is ABSENT), f"{block} has a frame?"
            if block.frame is not None:
                state = _state(block, block in self._second_copies)
                assert block.host is state, f"{block} should be {state.name}"
            assert (block in self._pinned) == (block.host is PINNED)
            assert (block in self._duplicated) == (block.host is DUPLICATED)


def _state(block: Block, is_second: bool) -> HostState:
    """The state that a block with a frame should have. A block that the writer is reading stays in
    the eviction order; the search for a victim skips it."""
    if block.busy > (block.below is Below.WRITING) or (block.ref_count and block.slot is None):
        return IN_USE
    if block.pinned:
        return PINNED
    return DUPLICATED if is_second else EVICTABLE
