"""How long blocks live in a tier, how long unused before they leave, and how soon they come back.

Observed where a block leaves and where it is hit, never at a lookup that finds nothing. The memory
tiers' are fed on the engine thread, the disk's under its own lock.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tiers.histogram import Histogram, Spread

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
# From a burst of one conversation to a system prompt that is used once a month.
AGES_S = (
    *(1, 5, 15, _MINUTE, 5 * _MINUTE, 15 * _MINUTE),
    *(_HOUR, 4 * _HOUR, 12 * _HOUR, _DAY, 3 * _DAY, 7 * _DAY, 30 * _DAY),
)
_NOTHING = Spread(AGES_S, (0,) * (len(AGES_S) + 1), 0.0)


class Cause(StrEnum):
    """Why a block left a tier; the label of `cachesvc_evictions_total`."""

    ROOM = "room"  # another block needed the place
    QUOTA = "quota"  # its tenant was over its share
    AGE = "age"  # nobody used it for longer than the idle limit
    REQUEST = "request"  # an operator evicted or purged it
    REDUNDANT = "redundant"  # another block holds all its tokens
    FAULT = "fault"  # it could not be read, or stood where nothing can be trusted


@dataclass(frozen=True, slots=True)
class LifeStats:
    """A snapshot, in seconds."""

    lifetime: Spread = _NOTHING  # from coming into the tier to leaving it
    idle: Spread = _NOTHING  # from the last use to leaving; of a block never used, the lifetime
    reuse_gap: Spread = _NOTHING  # from one use to the next, of blocks that the tier served
    causes: Mapping[Cause, int] = field(default_factory=dict)  # blocks that left, by why


class Lives:
    """One tier's observations."""

    def __init__(self, bounds: Sequence[float] = AGES_S) -> None:
        self._lifetime = Histogram(bounds)
        self._idle = Histogram(bounds)
        self._reuse_gap = Histogram(bounds)
        self._causes: Counter[Cause] = Counter()

    def left(self, cause: Cause, *, lived_s: float, idle_s: float) -> None:
        """A block left the tier."""
        self._lifetime.observe(lived_s)
        self._idle.observe(min(lived_s, idle_s))
        self._causes[cause] += 1

    def reused(self, gap_s: float, num_blocks: int = 1) -> None:
        """Blocks were served, `gap_s` after they were used before."""
        self._reuse_gap.observe(max(0.0, gap_s), num_blocks)

    def stats(self) -> LifeStats:
        return LifeStats(
            self._lifetime.spread(),
            self._idle.spread(),
            self._reuse_gap.spread(),
            dict(self._causes),
        )
