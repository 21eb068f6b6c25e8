"""What every tier off the device is: a synchronous store of whole blocks that owns no threads."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tiers.blocks.keys import BlockId, PrefixKey
from tiers.disk.rows import Removed
from tiers.errors import MissReason
from tiers.telemetry.lifetimes import LifeStats

if TYPE_CHECKING:
    from tiers.blocks.frames import (
        Frame,
    )  # the command line names tiers, and loads no torch for that


class TierName(StrEnum):
    """Where a block can be, hottest first; the label of every tier counter and usage split."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


class Loaded(NamedTuple):
    """How many leading blocks were filled, and why the next was not (None: all asked for were)."""

    num_blocks: int
    reason: MissReason | None


@dataclass(frozen=True, slots=True)
class ShardStats:
    """One file of a tier that is kept in files. `ready` is False while it is being replaced."""

    name: str
    ready: bool
    map_bytes: int = 0  # what the file may grow to
    used_bytes: int = 0  # of it, in pages that hold something


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
        """Fill `into[i]` with block `ids[i]`, verified; stop at the first that cannot be served."""
        ...

    def store(self, ids: Sequence[BlockId], frames: "Sequence[Frame]") -> list[PrefixKey]:
        """Write blocks not yet held; returns the keys, of these and others, not held any more."""
        ...

    def discard(self, keys: Sequence[PrefixKey]) -> int:
        """Forget these blocks, but those to `keep`; returns how many were held."""
        ...

    def keep(self, keys: Collection[PrefixKey]) -> None:
        """From now on drop these neither for room nor for age nor when asked to. Any thread;
        returns at once."""
        ...

    def demoted(self, keys: Sequence[PrefixKey]) -> None:
        """The tiers above gave up these, which are held here: they were used. As `keep`."""
        ...

    def held(self, keys: Sequence[PrefixKey]) -> list[bool]:
        """Which of these are held, each for itself."""
        ...

    def trace(self, key: PrefixKey) -> BlockId | None:
        """The identity of the block under a key."""
        ...

    def purge(self, roots: Collection[PrefixKey]) -> Removed:
        """Delete every block of these scopes. Raises what storage raises."""
        ...

    def count(self, roots: Collection[PrefixKey]) -> int:
        """How many blocks of these scopes are held, by looking at each block. Raises likewise."""
        ...

    def flush(self) -> None:
        """Make what was stored durable, and do what may be put off: expiry, order, clean-up.

        Called by the writer thread when it has nothing else to do, and at the end.
        """
        ...

    def stats(self) -> TierStats: ...

    def close(self) -> None: ...
