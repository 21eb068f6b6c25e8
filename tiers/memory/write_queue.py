"""The state of each block in the tiers below memory, and the blocks waiting to be written there.

Only this module changes `Block.below`, except for uses noted during a lookup. Engine thread only.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from tiers.memory.block import BELOW_MOVES, Below, Block, BlockState, HostState


class WriteQueue:
    """Invariant: an unused block is WAITING exactly while it is `worth` writing and idle."""

    def __init__(self) -> None:
        self.worth: Callable[[Block], bool] = lambda block: False  # set by the write policy
        self.num_writing = 0  # blocks that the writer thread is reading
        self._waiting: OrderedDict[Block, None] = OrderedDict()  # coldest first

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, block: Block) -> bool:
        return block in self._waiting

    def __iter__(self) -> Iterator[Block]:
        return iter(self._waiting)

    def sync(self, block: Block) -> None:
        """Recompute ABSENT or WAITING after the block's frame, use or worth may have changed."""
        below = block.below
        if below is Below.ABSENT:
            if block.host > HostState.IN_USE and self.worth(block):
                self._move(block, Below.WAITING)
                self._waiting[block] = None
        elif below is Below.WAITING and not (block.host > HostState.IN_USE and self.worth(block)):
            del self._waiting[block]
            self._move(block, Below.ABSENT)

    def used(self, block: Block) -> None:
        """Make the block the warmest of those waiting, because it was just used."""
        if block.below is Below.WAITING:
            self._waiting.move_to_end(block)

    def begin_write(self, block: Block) -> None:
        """Mark that the writer thread is about to read the block's frame."""
        if block.below is Below.WAITING:
            del self._waiting[block]
        self._move(block, Below.WRITING)
        block.busy += 1
        self.num_writing += 1

    def end_write(self, block: Block, below: Below) -> None:
        """The writer thread is done with the frame. `below`: whether a lower tier has it."""
        assert block.below is Below.WRITING, f"{block} is not being written"
        self._move(block, below)
        block.busy -= 1
        self.num_writing -= 1

    def loaded(self, block: Block, *, held: bool) -> None:
        """Note that the block was loaded from below. `held`: that tier keeps its copy, unless it
        dropped the block meanwhile."""
        if block.below is Below.REFUSED:
            self._move(block, Below.ABSENT)
        elif held:
            self._move(block, Below.HELD)

    def dropped(self, block: Block) -> None:
        """Note that the tiers below dropped the block, which may be on its way up from them."""
        if block.below is Below.HELD:
            self._move(block, Below.ABSENT)
        elif block.below is Below.ABSENT and block.state is BlockState.LOADING:
            self._move(block, Below.REFUSED)

    def _move(self, block: Block, to: Below) -> None:
        assert to in BELOW_MOVES[block.below], f"{block} cannot become {to.name} below"
        block.below = to

    def check(self, blocks: list[Block]) -> None:
        """Assert that exactly the right blocks are waiting."""
        waiting = {block for block in blocks if block.below is Below.WAITING}
        assert waiting == set(self._waiting), "a block waits for the disk that should not"
        for block in blocks:
            if block.ref_count:
                continue  # it may become worth writing when its use ends
            wants = block.host > HostState.IN_USE and self.worth(block)
            free = block.below in (Below.ABSENT, Below.WAITING)
            assert not free or wants == (block in waiting), f"{block} waits for the disk?"
