"""One block in a node's memory: its frame, its users and its owner."""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, auto

from tiers.blocks.keys import BlockId, PrefixKey


class NodeBlockState(Enum):
    """How far a block is."""

    FILLING = auto()  # a client writes it
    LOADING = auto()  # it comes from the tier below
    HELD = auto()


@dataclass(slots=True, eq=False)
class NodeBlock:
    """One block and its frame. `leases` counts clients and writes that use the frame."""

    id: BlockId
    frame: int
    state: NodeBlockState
    client: int = 0  # who fills it
    leases: int = 0
    is_below: bool = False
    tick: int = 0  # when it was last used, against all blocks of the node
    group: Hashable = None  # whose quota it counts for
    pinned: bool = False
    detached: bool = False  # found by nobody any more; it goes with who uses it

    @property
    def key(self) -> PrefixKey:
        return self.id.key

    @property
    def held_below(self) -> bool:
        return self.is_below
