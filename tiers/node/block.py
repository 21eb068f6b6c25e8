"""One block in a node's memory: its frame, its users and its owner."""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, auto

from tiers.blocks.keys import BlockId, PrefixKey


class NodeBlockState(Enum):
    """Whether a block is complete, and who is filling it if not."""

    FILLING = auto()  # a client is writing it
    LOADING = auto()  # it is being loaded from the tier below
    HELD = auto()


@dataclass(slots=True, eq=False)
class NodeBlock:
    """One block and its frame. `leases` counts the clients and writes that use the frame."""

    id: BlockId
    frame: int
    state: NodeBlockState
    client: int = 0  # the client that fills it
    leases: int = 0
    is_below: bool = False
    tick: int = 0  # order of its last use among all blocks of the node
    group: Hashable = None  # the owners whose quota it counts against
    pinned: bool = False
    detached: bool = False  # no longer in the index; freed when its last user releases it

    @property
    def key(self) -> PrefixKey:
        return self.id.key

    @property
    def held_below(self) -> bool:
        return self.is_below
