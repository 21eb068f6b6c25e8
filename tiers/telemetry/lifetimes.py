"""How long blocks stay in a tier, how long they are unused before they leave, and how soon they are
reused.

Observed when a block leaves and when it is hit, never at a lookup that finds nothing. The engine
thread feeds those of the memory tiers. The disk's are fed under its own lock.
"""

from collections import Counter

from tiers.histogram import Histogram
from tiers.tier import AGES_S, Cause, LifeStats


class Lives:
    def __init__(self) -> None:
        self._lifetime = Histogram(AGES_S)
        self._idle = Histogram(AGES_S)
        self._reuse_gap = Histogram(AGES_S)
        self._causes: Counter[Cause] = Counter()

    def left(self, cause: Cause, *, lived_s: float, idle_s: float) -> None:
        self._lifetime.observe(lived_s)
        self._idle.observe(min(lived_s, idle_s))
        self._causes[cause] += 1

    def reused(self, gap_s: float, num_blocks: int = 1) -> None:
        """Count blocks that were served `gap_s` after their previous use."""
        self._reuse_gap.observe(max(0.0, gap_s), num_blocks)

    def stats(self) -> LifeStats:
        return LifeStats(
            self._lifetime.spread(),
            self._idle.spread(),
            self._reuse_gap.spread(),
            dict(self._causes),
        )
