"""Latency histograms, fine enough for percentiles over any window.

Prometheus' buckets are few, to keep scrapes small. These are four per octave, so an interpolated
percentile is off by at most 9 %. Fed by `cachesvc.observability.metrics` on the engine thread.
"""

from collections.abc import Mapping, Sequence

from tiers.histogram import Histogram, Spread

PER_OCTAVE = 4
BOUNDS_S = tuple(0.0005 * 2 ** (step / PER_OCTAVE) for step in range(20 * PER_OCTAVE + 1))
NAMES = ("ttft", "inter_token", "request", "queue", "load", "prefill")


class Latencies:
    def __init__(self) -> None:
        self._histograms = {name: Histogram(BOUNDS_S) for name in NAMES}

    def observe(self, name: str, seconds: float) -> None:
        """Engine thread."""
        self._histograms[name].observe(seconds)

    def spreads(self) -> Mapping[str, Spread]:
        """Any thread."""
        return {name: histogram.spread() for name, histogram in self._histograms.items()}


def percentile(counts: Sequence[int], share: float, bounds: Sequence[float] = BOUNDS_S) -> float:
    """The value below which `share` of the values lie, interpolated within its bucket.

    NaN if there are no values. Values above the last bound count as equal to it.
    """
    total = sum(counts)
    if not total:
        return float("nan")
    wanted, below = share * total, 0.0
    for number, count in enumerate(counts):
        if count and below + count >= wanted:
            low = bounds[number - 1] if number else 0.0
            high = bounds[min(number, len(bounds) - 1)]
            return low + (high - low) * (wanted - below) / count
        below += count
    return bounds[-1]
