"""What every tier off the device is: a synchronous store of whole blocks that owns no threads."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tiers.blocks.keys import BlockId, PrefixKey
from tiers.errors import MissReason
from tiers.histogram import Spread

if TYPE_CHECKING:
    from tiers.blocks.frames import (
        Frame,  # the command line names tiers, and loads no torch for that
    )


_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
# From a burst of one conversation to a system prompt that is used once a month.
AGES_S = (
    *(1, 5, 15, _MINUTE, 5 * _MINUTE, 15 * _MINUTE),
    *(_HOUR, 4 * _HOUR, 12 * _HOUR, _DAY, 3 * _DAY, 7 * _DAY, 30 * _DAY),
)
_NOTHING = Spread(AGES_S, (0,) * (len(AGES_S) + 1), 0.0)


class TierName(StrEnum):
    """Where a block can be, hottest first; the label of every tier counter and usage split."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


class Cause(StrEnum):
    """Why a block left a tier; the label of `cachesvc_evictions_total`."""

    ROOM = "room"  # another block needed the place
    QUOTA = "quota"  # its tenant was over its share
    AGE = "age"  # nobody used it for longer than the idle limit
    REQUEST = "request"  # an operator evicted or purged it
    REDUNDANT = "redundant"  # another block holds all its tokens
    FAULT = "fault"  # it could not be read, or stood where nothing can be trusted


class Age(NamedTuple):
    """How long ago, in seconds: so that no clock need agree with another's."""

    computed_s: float = 0.0  # since a block's KV was computed
    used_s: float = 0.0  # since it was last used


@dataclass(frozen=True, slots=True)
class Loaded:
    """How many leading blocks were filled, and why the next was not (None: all asked for were).

    `sources` says which tier each came from, where that is not the one that was asked; `ages` how
    many seconds ago each was computed, where that is known.
    """

    num_blocks: int
    reason: MissReason | None
    sources: "tuple[TierName, ...]" = ()
    ages: tuple[float, ...] = field(default=(), compare=False)


class Removed(NamedTuple):
    """What was taken away."""

    num_blocks: int = 0
    stored_bytes: int = 0  # as they lay in the tier
    logical_bytes: int = 0  # of KV

    @classmethod
    def whole(cls, num_blocks: int, block_bytes: int) -> "Removed":
        """Blocks that lay as they are, uncompressed."""
        return cls(num_blocks, num_blocks * block_bytes, num_blocks * block_bytes)

    def plus(self, other: "Removed") -> "Removed":
        return Removed(*(a + b for a, b in zip(self, other, strict=True)))


class Sample(NamedTuple):
    """Some of the blocks that a tier holds: those whose keys, themselves hashes, begin with a
    number (u32, little-endian) under `bound`. The one unused the longest comes first."""

    keys: tuple[PrefixKey, ...]
    bound: int


@dataclass(frozen=True, slots=True)
class LifeStats:
    """A snapshot, in seconds."""

    lifetime: Spread = _NOTHING  # from coming into the tier to leaving it
    idle: Spread = _NOTHING  # from the last use to leaving; of a block never used, the lifetime
    reuse_gap: Spread = _NOTHING  # from one use to the next, of blocks that the tier served
    causes: Mapping[Cause, int] = field(default_factory=dict)  # blocks that left, by why


@dataclass(frozen=True, slots=True)
class ShardStats:
    """One file of a tier that is kept in files. Written to while `ready`; read also while it is
    `checking`, after an error or at the start."""

    name: str
    ready: bool
    map_bytes: int = 0  # what the file may grow to
    used_bytes: int = 0  # of it, in pages that hold something
    checking: bool = False


@dataclass(frozen=True, slots=True)
class TierStats:
    """An immutable snapshot of one tier. Counters only grow; sizes are now."""

    name: TierName
    num_blocks: int = 0
    used_bytes: int = 0  # what the capacity bounds: bytes of memory or of files
    logical_bytes: int = 0  # bytes of KV that these blocks are when loaded
    capacity_bytes: int = 0
    hits: int = 0  # blocks served
    misses: int = 0  # blocks asked for and not served
    stored: int = 0  # blocks written
    evicted: int = 0  # blocks dropped for room or for age
    read_bytes: int = 0  # payload bytes as they lie in the tier
    written_bytes: int = 0
    faults: Mapping[MissReason, int] = field(default_factory=dict)
    lives: LifeStats = field(default_factory=LifeStats)
    shards: tuple[ShardStats, ...] = ()


class Tier(Protocol):
    """A store of whole blocks, found by key and proven by identity.

    Synchronous; safe to call from several reader threads and one writer thread at a time.
    A fault is a miss with a reason, never an exception, except `TierClosed`.
    """

    name: TierName

    def probe(self, ids: Sequence[BlockId]) -> int:
        """Length of the leading run held. May be optimistic: only `load` verifies."""
        ...

    def load(self, ids: Sequence[BlockId], into: "Sequence[Frame]") -> Loaded:
        """Fill `into[i]` with block `ids[i]`, verified; stop at the first that cannot be served.

        Of a frame's bytes only its `part` of the block is filled."""
        ...

    def store(
        self, ids: Sequence[BlockId], frames: "Sequence[Frame]", ages: Sequence[Age] = ()
    ) -> list[PrefixKey]:
        """Write blocks not yet held; returns the keys, of these and others, not held any more.

        Without `ages` they were computed and used now.
        """
        ...

    def discard(self, keys: Sequence[PrefixKey]) -> int:
        """Forget these blocks, but those to `keep`; returns how many were held."""
        ...

    def stats(self) -> TierStats: ...

    def close(self) -> None: ...


class ManagedTier(Tier, Protocol):
    """A tier as the cache runs it: with what operators ask of it, and what its writer does when
    idle. Whatever stands beneath memory is one of these."""

    def keep(self, keys: Collection[PrefixKey]) -> None:
        """From now on drop these neither for room nor for age nor when asked to. Any thread;
        returns at once."""
        ...

    def demoted(self, keys: Sequence[PrefixKey], idle_s: Sequence[float]) -> None:
        """The tiers above gave up these, which are held here: they were used so long ago. As
        `keep`."""
        ...

    def flush(self) -> None:
        """Make what was stored durable, and do what may be put off: expiry, order, clean-up.

        Called by the writer thread when it has nothing else to do, and at the end.
        """
        ...

    def held(self, keys: Sequence[PrefixKey]) -> list[bool]:
        """Which of these are held, each for itself."""
        ...

    def trace(self, key: PrefixKey) -> BlockId | None:
        """The identity of the block under a key."""
        ...

    def sample(self, max_keys: int) -> Sample:
        """At most so many of the blocks held. Looks at the key of each block, so it takes time;
        raises what storage raises."""
        ...

    def purge(self, roots: Collection[PrefixKey]) -> Removed:
        """Delete every block of these scopes. Raises what storage raises."""
        ...

    def count(self, roots: Collection[PrefixKey]) -> int:
        """How many blocks of these scopes are held, by looking at each block. Raises likewise."""
        ...

    def quotas(self) -> Mapping[Hashable, tuple[int, int]]:
        """Bytes (used, promised) of each group; empty without quotas."""
        ...
