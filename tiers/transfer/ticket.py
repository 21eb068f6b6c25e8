"""A request's claim on its cached prefix, and the state of its promotion. Engine thread only."""

from dataclasses import dataclass, field
from enum import Enum, auto

from tiers.blocks.chain import Chain
from tiers.errors import MissReason
from tiers.memory.block import Block
from tiers.tier import TierName
from tiers.transfer.mover import HeldJob, ProbeJob


class Progress(Enum):
    """What a ticket is waiting for."""

    LOADING = auto()  # a probe, a load or a copy to the device is under way
    WAITING = auto()  # the next block is being computed or loaded for another request
    NO_ROOM = auto()  # its blocks are in memory, but not all have a slot
    READY = auto()  # every block it will get is on the device


class TicketState(Enum):
    """What is known of the blocks that follow those of a ticket.

    OPEN ─► PROBING ─► LOADING ──────► SETTLED
     ▲ ▲       │  └───────────────────────▲
     │ └───────┘ └─► LOADING_PART ─┐
     └─────────────────────────────┘
    """

    BYPASSED = auto()  # the prompt must not use cached blocks
    OPEN = auto()  # the disk is to be probed for blocks not above it
    PROBING = auto()  # the disk is being probed
    LOADING = auto()  # some of its blocks may be loading, or lost by a failed load
    LOADING_PART = auto()  # the same; probe again once another request has made the next block
    SETTLED = auto()  # the disk has no more to give


_MOVES = {
    TicketState.BYPASSED: (),
    TicketState.OPEN: (TicketState.PROBING, TicketState.SETTLED),
    TicketState.PROBING: (
        *(TicketState.OPEN, TicketState.SETTLED),
        *(TicketState.LOADING, TicketState.LOADING_PART),
    ),
    TicketState.LOADING: (TicketState.SETTLED,),
    TicketState.LOADING_PART: (TicketState.OPEN,),
    TicketState.SETTLED: (),
}


@dataclass(slots=True, eq=False)
class Resume:
    """Where the prompt of a ticket can be resumed; see `tiers.checkpoints`.

    `positions` are block counts at which there are checkpoints, the longest last. `part` is the
    ticket of the one that is to be used.
    """

    chain: Chain  # of the whole prompt
    positions: list[int]
    job: HeldJob | None = None
    part: "Ticket | None" = None


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's claim on its cached prefix. Invariant: it has one reference to each of
    `blocks`, and it has a probe exactly while it is PROBING.

    `blocks[i]` is block i of the chain, served from `sources[i]`. `stop` says why there are no
    more.
    """

    chain: Chain
    state: TicketState = TicketState.OPEN
    blocks: list[Block] = field(default_factory=list)
    sources: list[TierName] = field(default_factory=list)
    stop: MissReason = MissReason.ABSENT
    probe: ProbeJob | None = None
    num_on_device: int = 0  # leading blocks known to have a slot
    closed: bool = False  # a copy of its next block failed: it takes no more
    windows: ProbeJob | None = None  # which missing windows of its blocks can be loaded
    mended: bool = False  # whether those of its last blocks were requested
    resume: "Resume | None" = None  # for a model with recurrent states

    @property
    def reads(self) -> bool:
        """Whether it may use cached blocks."""
        return self.state is not TicketState.BYPASSED

    @property
    def is_loading(self) -> bool:
        """Whether some of its blocks may be loading."""
        return self.state in (TicketState.LOADING, TicketState.LOADING_PART)

    def move(self, to: TicketState) -> None:
        assert to in _MOVES[self.state], f"a ticket goes from {self.state.name} to {to.name}"
        self.state = to

    def cut(self, number: int) -> list[Block]:
        """Shorten it to its first `number` blocks. Returns the others, last first, for release."""
        left = self.blocks[number:][::-1]
        del self.blocks[number:], self.sources[number:]
        return left
