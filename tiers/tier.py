"""The protocol of every tier off the device: a synchronous store of whole blocks without
threads."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tiers.blocks.keys import BlockId, PrefixKey
from tiers.errors import MissReason
from tiers.histogram import Spread

if TYPE_CHECKING:
    from tiers.blocks.frames import (
        Frame,  # the command line names tiers without loading torch
    )


_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
# From bursts within one conversation to a system prompt that is used once a month.
AGES_S = (
    *(1, 5, 15, _MINUTE, 5 * _MINUTE, 15 * _MINUTE),
    *(_HOUR, 4 * _HOUR, 12 * _HOUR, _DAY, 3 * _DAY, 7 * _DAY, 30 * _DAY),
)
_NOTHING = Spread(AGES_S, (0,) * (len(AGES_S) + 1), 0.0)


class TierName(StrEnum):
    """Where a block can be, hottest first. The label of every tier counter and usage split."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


MEMORY = (TierName.DEVICE, TierName.HOST)  # every other tier is below memory


class Cause(StrEnum):
    """Why a block left a tier. The label of `cachesvc_evictions_total`."""

    ROOM = "room"  # another block needed the room
    QUOTA = "quota"  # its owner was over its share
    AGE = "age"  # unused for longer than the idle limit
    REQUEST = "request"  # an operator evicted or purged it
    REDUNDANT = "redundant"  # another block holds all its tokens
    FAULT = "fault"  # it could not be read, or its file could not be trusted


class Age(NamedTuple):
    """How long ago, in seconds, so that clocks need not agree."""

    computed_s: float = 0.0  # since a block's KV was computed
    used_s: float = 0.0  # since it was last used


@dataclass(frozen=True, slots=True)
class Loaded:
    """How many leading blocks were filled, and why the next was not (None: all were filled).

    `sources` gives the tier that each came from, if not the tier that was called. `ages` gives how
    many seconds ago each was computed, if known.
    """

    num_blocks: int
    reason: MissReason | None
    sources: "tuple[TierName, ...]" = ()
    ages: tuple[float, ...] = field(default=(), compare=False)


class Removed(NamedTuple):
    """What a call removed."""

    num_blocks: int = 0
    stored_bytes: int = 0  # as stored in the tier
    logical_bytes: int = 0  # bytes of KV

    @classmethod
    def whole(cls, num_blocks: int, block_bytes: int) -> "Removed":
        """Removed blocks that were stored uncompressed."""
        return cls(num_blocks, num_blocks * block_bytes, num_blocks * block_bytes)

    def plus(self, other: "Removed") -> "Removed":
        return Removed(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class Purged:
    """What a purge removed from each tier, and what a check of every block found afterwards."""

    roots: tuple[PrefixKey, ...]
    removed: Mapping[TierName, Removed]
    in_use: int  # blocks that running requests keep, unshared, until they end
    pins: tuple[str, ...]  # pins that ended with their blocks
    num_left: int  # 0 unless the purge failed
    checkpoints: Mapping[TierName, Removed] = field(default_factory=dict)  # of recurrent states


@dataclass(frozen=True, slots=True)
class LifeStats:
    """A snapshot of one tier's lifetimes, in seconds."""

    lifetime: Spread = _NOTHING  # from entering the tier to leaving it
    idle: Spread = _NOTHING  # from the last use to leaving; the lifetime if never used
    reuse_gap: Spread = _NOTHING  # from one use to the next, for blocks that the tier served
    causes: Mapping[Cause, int] = field(default_factory=dict)  # blocks that left, by cause


@dataclass(frozen=True, slots=True)
class ShardStats:
    """One file of a tier that is stored in files. It is written only while `ready`. It is also read
    while `checking`, which is after an error or at the start."""

    name: str
    ready: bool
    map_bytes: int = 0  # the size that the file may reach
    used_bytes: int = 0  # of those, in pages that are used
    checking: bool = False
    failing: str = ""  # why its last commits failed; empty if they did not
    repaired: str = ""  # what it lost to damage since the start; empty if nothing


@dataclass(frozen=True, slots=True)
class TierStats:
    """An immutable snapshot of one tier. Counters only grow. Sizes are current."""

    name: TierName
    num_blocks: int = 0
    used_bytes: int = 0  # bytes of memory or files, which the capacity bounds
    logical_bytes: int = 0  # bytes of KV in these blocks when loaded
    capacity_bytes: int = 0  # at present
    setting_bytes: int = 0  # of a disk: the capacity that it was given
    limit: str = ""  # why the capacity is less than that
    hits: int = 0  # blocks served
    misses: int = 0  # blocks requested but not served
    stored: int = 0  # blocks written
    evicted: int = 0  # blocks dropped for room or age
    read_bytes: int = 0  # payload bytes as stored in the tier
    written_bytes: int = 0
    faults: Mapping[MissReason, int] = field(default_factory=dict)
    lives: LifeStats = field(default_factory=LifeStats)
    shards: tuple[ShardStats, ...] = ()


class Tier(Protocol):
    """A store of whole blocks, found by key and verified by identity.

    Synchronous. Several reader threads and one writer thread may call it at the same time. A fault
    is a miss with a reason. The only exception raised is `TierClosed`.
    """

    name: TierName

    def probe(self, ids: Sequence[BlockId]) -> int:
        """The length of the leading run held. May be optimistic, since only `load` verifies."""

    def load(self, ids: Sequence[BlockId], into: "Sequence[Frame]") -> Loaded:
        """Fill `into[i]` with block `ids[i]`, verified. Stops at the first that cannot be served.
        Only the `part` of the block that a frame asks for is filled."""

    def store(
        self, ids: Sequence[BlockId], frames: "Sequence[Frame]", ages: Sequence[Age] = ()
    ) -> list[PrefixKey]:
        """Write blocks not yet held. Returns the keys, of these and others, that are no longer
        held. Without `ages` they count as computed and used now."""

    def discard(self, keys: Sequence[PrefixKey]) -> int:
        """Remove these blocks, except those to `keep`. Returns how many were held."""

    def stats(self) -> TierStats: ...

    def close(self) -> None: ...


class Leveled(Protocol):
    """One of the tiers beneath memory, by itself."""

    name: TierName

    def probe(self, ids: Sequence[BlockId]) -> int:
        """As `Tier.probe`."""

    def stats(self) -> TierStats: ...


class ManagedTier(Tier, Protocol):
    """A tier as the cache runs it: with operators' calls, and with the idle work of its writer.

    Every tier directly below memory is one. It may have further tiers beneath it, and then it
    answers for all of them. A tier that stands alone inherits what it does not write.
    """

    def levels(self) -> "Sequence[Leveled]":
        """The tiers in this one, hottest first. Each has a name and stats of its own."""
        return (self,)

    def places(self, ids: Sequence[BlockId]) -> tuple[list[TierName], bool]:
        """The tier of each block in the leading run held, and whether more is held farther down,
        which takes longer to load than to compute. Like `probe`, it may be optimistic."""
        return [self.name] * self.probe(ids), False

    def used(self, keys: Sequence[PrefixKey]) -> None:
        """Note hits on these keys, here or above. Any thread. Returns at once."""
        return

    def paced(self, prefill_tokens_per_s: float) -> None:
        """Note how fast tokens are computed now (0: unknown), which a slow tier must beat."""
        return

    @property
    def num_readers(self) -> int:
        """How many threads should read it at once."""
        return 2

    @property
    def is_shared(self) -> bool:
        """Whether other machines can load what is published here."""
        return False

    def publish(self, keys: Sequence[PrefixKey]) -> "Future[int]":
        """Send a prefix to the tier that machines share: how many leading blocks it has then."""
        nowhere: Future[int] = Future()
        nowhere.set_result(0)
        return nowhere

    def keep(self, keys: Collection[PrefixKey]) -> None:
        """Do not drop these keys for room, for age or on request from now on. Any thread."""

    def have_windows(self, ids: Sequence[BlockId]) -> list[bool]:
        """Whether the window part of each can be loaded. As `probe`, it may be optimistic."""
        return [True] * len(ids)

    def demoted(
        self, keys: Sequence[PrefixKey], idle_s: Sequence[float], windows: Sequence[bool] = ()
    ) -> None:
        """Note that the tiers above dropped these blocks, which are held here, last used `idle_s`
        ago. `windows` says whether that use needed their windows. Threads as for `keep`."""

    def flush(self) -> None:
        """Make stored blocks durable and do deferred work: expiry, order, clean-up. The writer
        thread calls it when idle, and at the end."""

    def held(self, keys: Sequence[PrefixKey]) -> list[bool]:
        """Whether each of these is held."""

    def trace(self, key: PrefixKey) -> BlockId | None:
        """The identity of the block under a key, if held."""

    def purge(self, roots: Collection[PrefixKey]) -> Removed:
        """Delete every block of these scopes. Raises storage errors."""

    def count(self, roots: Collection[PrefixKey]) -> int:
        """How many blocks of these scopes are held, by reading all. Raises storage errors."""

    def quotas(self) -> Mapping[Hashable, tuple[int, int]]:
        """Bytes (used, promised) of each group. Empty without quotas."""
