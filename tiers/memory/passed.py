"""Windows that no use needs. They leave before any block does. Engine thread only."""

from collections import OrderedDict
from collections.abc import Callable

from tiers.memory.block import Block


class PassedWindows:
    """A tier's unused blocks whose last use did not need their windows; oldest first. `is_spare`
    says whether a block is still one of them, and has its windows in the tier."""

    def __init__(self, is_spare: Callable[[Block], bool]) -> None:
        self._is_spare = is_spare
        self._blocks: OrderedDict[Block, None] = OrderedDict()

    def sync(self, block: Block) -> None:
        """Take in that the block may be one of them now, or no longer."""
        if self._is_spare(block):
            self._blocks[block] = None
        else:
            self._blocks.pop(block, None)

    def forget(self, block: Block) -> None:
        """Take in that the block leaves the tier."""
        self._blocks.pop(block, None)

    def next(self) -> Block | None:
        """The next block to give up its windows. It is asked about once."""
        while self._blocks:
            block, _ = self._blocks.popitem(last=False)
            if self._is_spare(block):
                return block
        return None
