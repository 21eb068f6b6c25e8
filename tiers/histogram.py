"""Histograms without Prometheus: the tiers observe values, `/metrics` shows them."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A snapshot. `counts[i]` counts values in (bounds[i - 1], bounds[i]], the last those above."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float  # sum of the values

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts values by fixed upper bounds. One thread observes. Any thread may take a snapshot."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def spread(self) -> Spread:
        return Spread(self._bounds, tuple(self._counts), self._total)
