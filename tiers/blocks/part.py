"""The parts of a block whose layout has windows. Imports no torch."""

from enum import Enum, auto


class Part(Enum):
    """The part of a block that a frame holds or, during a load, will hold."""

    WHOLE = auto()
    LASTING = auto()  # only the first bytes, `BlockLayout.lasting_nbytes`
    WINDOW = auto()  # the lasting part is there; the rest is being loaded
