"""Which part of a block is meant, where its layout has windows. Knows no torch."""

from enum import Enum, auto


class Part(Enum):
    """What a frame has of a block, and while it is loaded, is to get."""

    WHOLE = auto()
    LASTING = auto()  # the first bytes alone, `BlockLayout.lasting_nbytes`
    WINDOW = auto()  # the lasting part stands; the rest is on its way
