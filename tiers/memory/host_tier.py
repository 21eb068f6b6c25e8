"""The host as a tier: the frame and state of each block, and which block leaves next.

The one place that changes `Block.host`. Engine thread only.
"""

from collections import OrderedDict, deque
from collections.abc import Collection

from tiers.blocks.frames import Frame, FrameArena
from tiers.blocks.part import Part
from tiers.memory.block import HOST_MOVES, Below, Block, HostState
from tiers.memory.index import BlockIndex
from tiers.memory.write_queue import WriteQueue
from tiers.policy.policy import Policy

MIN_LOOKAHEAD = 8  # the coldest host blocks looked at, at least, for one that costs nothing
MAX_LIFTED = 4096  # blocks remembered as second copies; until forgotten, one stays in memory

ABSENT, IN_USE, EVICTABLE, DUPLICATED, PINNED = HostState


class HostTier:
    """Invariants: a block has a frame exactly while it is not ABSENT; the policy knows it then,
    and may choose it while it is EVICTABLE."""

    def __init__(
        self,
        index: BlockIndex,
        frames: FrameArena | None,
        policy: Policy[Block],
        queue: WriteQueue,
    ) -> None:
        self.frames = frames
        self.policy = policy
        self.num_blocks = 0
        self.lookahead = MIN_LOOKAHEAD
        self._index = index
        self._queue = queue
        # Lifted to the device, longest ago first. Some have left it, or the host, since.
        self._lifted: deque[Block] = deque(maxlen=MAX_LIFTED)
        self._pinned: OrderedDict[Block, None] = OrderedDict()  # PINNED
        self._second_copies: set[Block] = set()  # DUPLICATED, while nothing else keeps them
        self._duplicated: OrderedDict[Block, None] = OrderedDict()  # DUPLICATED, oldest first

    def settle(self, block: Block, frame: Frame) -> None:
        """ABSENT to EVICTABLE, and on to what the block is: it owns this frame from here on."""
        self._move(block, EVICTABLE)
        block.frame = frame
        self.num_blocks += 1
        self.policy.insert(block, block.use, None, block.depth)
        self.sync(block)

    def sync(self, block: Block) -> None:
        """What is known of the block may have changed; so does its state, then."""
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

    def left_device(self, block: Block) -> None:
        """The block stands here alone now, and was used until now."""
        was_evictable = block.host is EVICTABLE
        self._second_copies.discard(block)
        self.sync(block)
        if was_evictable and block.host is EVICTABLE:
            self.policy.touch(block, block.use)
            self._queue.used(block)

    def lifted(self, block: Block, *, leaves_first: bool) -> None:
        """The block is being copied to the device: its frame is then a second copy, which where
        copies are not kept leaves before others."""
        if leaves_first:
            self._second_copies.add(block)
        self.sync(block)
        self._lifted.append(block)

    def victim(self, sparing: Collection[Block]) -> Block | None:
        """Who leaves next, forgotten by the policy. Duplicated blocks first; then the policy's
        choice, but not what waits for the disk while others nearly as cold do not; then pinned
        blocks that the disk has as well. Its frame is given up by `leave`."""
        block = next((b for b in self._duplicated if b.below is not Below.WRITING), None)
        queue = self._queue
        if block is None and not (sparing or queue or queue.num_writing):
            block = self.policy.victim()
            if block is not None:
                return block
        if block is None:
            block = self._cold(sparing)
        if block is None and not sparing:
            block = next((b for b in self._pinned if b.held_below), None)
        if block is not None:
            self.policy.remove(block)
        return block

    def leave(self, block: Block) -> Frame:
        """To ABSENT: the frame of a block that the policy has forgotten."""
        frame = block.frame
        assert frame is not None and not block.busy, f"the frame of {block} is in use"
        self._unlist(block)
        self._move(block, ABSENT)
        block.frame, frame.part = None, Part.WHOLE
        self._second_copies.discard(block)
        self.num_blocks -= 1
        self._queue.sync(block)
        return frame

    def free(self, block: Block) -> None:
        """Give a block's frame back to the arena."""
        assert self.frames is not None
        self.policy.remove(block)
        self.frames.give(self.leave(block))

    def _cold(self, sparing: Collection[Block]) -> Block | None:
        """The coldest block that does not wait for the disk; else one that the device has as well,
        of the coldest or of those lifted; else the end of a prefix, for what leads to it is worth
        more. Only that one is lost."""
        cold: list[Block] = []
        for count in (MIN_LOOKAHEAD, self.lookahead):
            cold = [
                block
                for block in self.policy.coldest(count + self._queue.num_writing)
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
        """Of the blocks lifted, the first whose frame is a second copy of what the device has."""
        while self._lifted:
            block = self._lifted[0]
            if block.slot is not None and block.host is IN_USE:
                return None  # its copy is under way, and so are those behind it
            self._lifted.popleft()
            idle = block.host is EVICTABLE and not block.busy
            if idle and block.slot is not None and block not in sparing:
                return block
        return None

    def _last_waiting(self, block: Block) -> Block:
        """The end of a prefix that goes on from this block through others that wait as it does."""
        while block.key is not None:
            following = self._index.children(block.key)
            child = next((b for b in following if b.below is Below.WAITING and not b.pinned), None)
            if child is None:
                break
            block = child
        return block

    def _unlist(self, block: Block) -> None:
        if block.host is PINNED:
            del self._pinned[block]
        elif block.host is DUPLICATED:
            del self._duplicated[block]

    def _move(self, block: Block, to: HostState) -> None:
        assert to in HOST_MOVES[block.host], f"{block} cannot become {to.name} on the host"
        block.host = to

    def check(self, blocks: list[Block]) -> None:
        """Assert that frames are conserved, and that each block's state is what it should be."""
        framed = [block for block in blocks if block.frame is not None]
        assert len(framed) == self.num_blocks
        if self.frames is not None:
            taken = self.frames.num_frames - self.frames.num_free
            assert taken == len(framed), "a frame leaked"
        for block in blocks:
            assert (block.frame is None) == (block.host is ABSENT), f"{block} has a frame?"
            if block.frame is not None:
                state = _state(block, block in self._second_copies)
                assert block.host is state, f"{block} should be {state.name}"
            assert (block in self._pinned) == (block.host is PINNED)
            assert (block in self._duplicated) == (block.host is DUPLICATED)


def _state(block: Block, is_second: bool) -> HostState:
    """The state of a block that has a frame. What the writer reads is passed over when a victim is
    chosen, and keeps its place in the order."""
    if block.busy > (block.below is Below.WRITING) or (block.ref_count and block.slot is None):
        return IN_USE
    if block.pinned:
        return PINNED
    return DUPLICATED if is_second else EVICTABLE
