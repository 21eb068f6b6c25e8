"""A block in memory: its identity, and its state in each tier.

A block has one state per tier. One module owns each state and makes its transitions:

    device   FILLING, then EVICTABLE or PINNED, IN_USE, and so on     `device_tier`
    host     EVICTABLE, IN_USE, DUPLICATED or PINNED                  `host_tier`
    below    WAITING, WRITING, then HELD or REFUSED                   `write_queue`

The tables below name the transitions; ABSENT is where each begins and ends. Everything else that a
block has are facts: how many need it, whether an operator pinned it. Engine thread only.
"""

from enum import IntEnum
from typing import TYPE_CHECKING, Union

from tiers.blocks.chain import Chain
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.blocks.packing import num_packed, pack, unpack
from tiers.blocks.part import Part
from tiers.errors import MissReason
from tiers.policy.policy import Use

if TYPE_CHECKING:
    from tiers.blocks.frames import Frame  # torch

NEVER_USED = Use(time_s=0.0)
NO_TOKENS = pack(b"")


class BlockState(IntEnum):
    """Whether the KV of a block is complete."""

    COMPUTING = 0  # a running sequence is filling it
    LOADING = 1  # a reader thread is filling its frame
    READY = 2
    LOST = 3  # its load failed; out of the index, and `fault` says why


class DeviceState(IntEnum):
    """A block's state on the device."""

    ABSENT = 0  # it has no slot
    FILLING = 1  # has a slot unknown to the policy; one sequence owns it
    IN_USE = 2  # the policy must not choose it
    EVICTABLE = 3  # unused; the policy may choose it
    PINNED = 4  # unused and pinned by an operator: it leaves after all others


class HostState(IntEnum):
    """A block's state on the host."""

    ABSENT = 0  # it has no frame
    IN_USE = 1  # a copy uses its frame, or the block is needed and no hotter tier has it
    EVICTABLE = 2  # the policy may choose it
    DUPLICATED = 3  # promoted; the host drops such copies before others
    PINNED = 4  # pinned by an operator: it leaves after all others, and only once the disk has it


class Below(IntEnum):
    """Whether the tiers below memory hold a block."""

    ABSENT = 0
    REFUSED = 1  # they did not take it: no write before its next use; or dropped it as it loads
    WAITING = 2  # to be written; its frame may be read
    WRITING = 3  # the writer thread reads its frame
    HELD = 4  # if they drop it, it may be written again


DEVICE_MOVES = (
    frozenset({DeviceState.FILLING}),
    frozenset({DeviceState.ABSENT, DeviceState.EVICTABLE, DeviceState.PINNED}),
    frozenset({DeviceState.ABSENT, DeviceState.EVICTABLE, DeviceState.PINNED}),
    frozenset({DeviceState.ABSENT, DeviceState.IN_USE, DeviceState.PINNED}),
    frozenset({DeviceState.ABSENT, DeviceState.IN_USE, DeviceState.EVICTABLE}),
)
HOST_MOVES = (
    frozenset({HostState.EVICTABLE}),
    frozenset(HostState) - {HostState.IN_USE},
    frozenset({HostState.ABSENT, HostState.IN_USE, HostState.PINNED}),
    frozenset(HostState) - {HostState.DUPLICATED},
    frozenset(HostState) - {HostState.PINNED},
)
BELOW_MOVES = (
    frozenset(Below) - {Below.ABSENT},
    frozenset({Below.ABSENT, Below.WRITING}),
    frozenset({Below.ABSENT, Below.WRITING}),
    frozenset({Below.ABSENT, Below.REFUSED, Below.HELD}),
    frozenset({Below.ABSENT}),
)

Following = Union[None, "Block", "dict[Block, None]"]


class Block:
    """One block's identity and location.

    Invariants: `ref_count` counts the sequences and tickets that need it; while it is not 0 the
    KV stands somewhere above the disk. `busy` counts threads and streams that use the frame's
    bytes. A block whose `tokens` are shorter than a block is partial: rows past them are not KV.
    A block with `key` None belongs to one sequence and is not in the index.
    """

    __slots__ = (
        "below", "busy", "content", "created_s", "depth", "device", "fault",
        "following", "frame", "hits", "host", "host_newer", "host_older", "key", "newer", "older",
        "packed", "parent", "pinned", "ref_count", "scope",
        "slot", "slot_whole", "state", "use", "writer",
    )  # fmt: skip

    def __init__(self, created_s: float) -> None:
        self.scope: PrefixKey | None = None
        self.parent: PrefixKey | None = None
        self.key: PrefixKey | None = None
        self.packed = NO_TOKENS
        self.content = b""
        self.depth = 0
        self.following: Following = None  # the index's: full blocks that continue this one
        self.older = self.newer = NO_BLOCK  # neighbours in the device's LRU order
        self.host_older = self.host_newer = NO_BLOCK  # and in the host's
        self.slot: int | None = None
        self.slot_whole = True  # its slot also has the KV of layers with windows
        self.frame: Frame | None = None
        self.state = BlockState.COMPUTING
        self.device = DeviceState.ABSENT
        self.host = HostState.ABSENT
        self.below = Below.ABSENT
        self.ref_count = 0
        self.busy = 0
        self.hits = 0
        self.pinned = False  # by an operator, with its prefix
        self.fault: MissReason | None = None
        self.created_s = created_s
        self.use: Use = NEVER_USED
        self.writer: Chain | None = None  # the sequence that appends rows to it; others copy it

    def name(self, identity: BlockId, packed: bytes, depth: int) -> None:
        """Gives the block its identity and its `packed` tokens, before it enters the index."""
        self.scope, self.parent, self.key, _, self.content = identity
        self.packed, self.depth = packed, depth

    def idle_s(self, now_s: float) -> float:
        """Seconds since its last use; `now_s` is monotonic."""
        return now_s - (self.use.time_s or self.created_s)

    def identity(self) -> BlockId:
        assert self.scope is not None and self.parent is not None and self.key is not None
        return BlockId(self.scope, self.parent, self.key, self.tokens, self.content)

    @property
    def held_below(self) -> bool:
        """Whether a tier below memory holds the block, so that memory may drop it."""
        return self.below >= Below.HELD

    @property
    def is_dirty(self) -> bool:
        """Whether it is a full block that only memory holds."""
        stands = self.key is not None and self.state is BlockState.READY
        return stands and self.below < Below.HELD

    @property
    def writes_whole(self) -> bool:
        """Whether a write has all of its KV: from its frame, or from one made of its slot."""
        return self.slot_whole if self.frame is None else self.frame.part is Part.WHOLE

    @property
    def is_whole(self) -> bool:
        """Whether all of its KV is above the disk, including that of layers with windows."""
        if self.slot is not None and self.slot_whole:
            return True
        return self.frame is not None and self.frame.part is Part.WHOLE

    @property
    def tokens(self) -> bytes:
        """Its ids as int32, little-endian; made each time."""
        return unpack(self.packed)

    @property
    def num_tokens(self) -> int:
        return num_packed(self.packed)

    def __repr__(self) -> str:
        key = self.key.hex()[:8] if self.key else "private"
        where = f"slot={self.slot} frame={self.frame.number if self.frame else None}"
        states = f"{self.state.name} {self.device.name}/{self.host.name}/{self.below.name}"
        return f"<Block {key} depth={self.depth} {states} {where} refs={self.ref_count}>"


NO_BLOCK: Block = object.__new__(Block)  # stands for a missing neighbour
