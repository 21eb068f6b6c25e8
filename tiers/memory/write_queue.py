"""The state of each block in the tiers below memory, and the blocks waiting to be written there.

The one place that changes `Block.below`, but for uses on a lookup's path. Engine thread only.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from tiers.memory.block import AFTER_DROP, BELOW_MOVES, Below, Block, HostState


class WriteQueue:
    """Invariant: a block that nobody needs is WAITING exactly while it is `worth` writing and has a
    frame that is not in use."""

    def __init__(self) -> None:
        self.worth: Callable[[Block], bool] = lambda block: False  # the write policy's
        self.num_writing = 0  # blocks that the writer thread reads
        self._waiting: OrderedDict[Block, None] = OrderedDict()  # coldest first

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._waiting)

    def sync(self, block: Block) -> None:
        """The block's frame, its use or its worth may have changed: ABSENT or WAITING?"""
        below = block.below
        if below is Below.ABSENT:
            if block.host > HostState.IN_USE and self.worth(block):
                self._move(block, Below.WAITING)
                self._waiting[block] = None
        elif below is Below.WAITING and not (block.host > HostState.IN_USE and self.worth(block)):
            del self._waiting[block]
            self._move(block, Below.ABSENT)

    def used(self, block: Block) -> None:
        """The block was touched: of those that wait it is the warmest now."""
        if block.below is Below.WAITING:
            self._waiting.move_to_end(block)

    def begin_write(self, block: Block) -> None:
        """The writer thread is to read the block's frame."""
        if block.below is Below.WAITING:
            del self._waiting[block]
        self._move(block, Below.WRITING)
        block.busy += 1
        self.num_writing += 1

    def end_write(self, block: Block, below: Below) -> None:
        """The writer thread is done with the frame, and the tiers below have the block or not."""
        assert block.below is Below.WRITING, f"{block} is not being written"
        self._move(block, below)
        block.busy -= 1
        self.num_writing -= 1

    def loaded(self, block: Block, *, held: bool) -> None:
        """The block was loaded, from a tier that keeps its copy or from one that does not."""
        if held:
            self._move(block, Below.HELD_USED)

    def dropped(self, block: Block) -> None:
        """The tiers below gave the block up."""
        after = AFTER_DROP[block.below]
        if after is not block.below:
            self._move(block, after)

    def _move(self, block: Block, to: Below) -> None:
        assert to in BELOW_MOVES[block.below], f"{block} cannot become {to.name} below"
        block.below = to

    def check(self, blocks: list[Block]) -> None:
        """Assert that exactly those wait that should."""
        waiting = {block for block in blocks if block.below is Below.WAITING}
        assert waiting == set(self._waiting), "a block waits for the disk that should not"
        for block in blocks:
            if block.ref_count:
                continue  # a use may make it worth writing, once it ends
            wants = block.host > HostState.IN_USE and self.worth(block)
            free = block.below in (Below.ABSENT, Below.WAITING)
            assert not free or wants == (block in waiting), f"{block} waits for the disk?"
