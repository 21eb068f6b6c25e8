"""How long blocks live in a tier, how long unused before they leave, and how soon they come back.

Observed where a block leaves and where it is hit, never at a lookup that finds nothing. The memory
tiers' are fed on the engine thread, the disk's under its own lock.
"""

from collections import Counter
from collections.abc import Sequence

from tiers.histogram import Histogram
from tiers.tier import AGES_S, Cause, LifeStats


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
