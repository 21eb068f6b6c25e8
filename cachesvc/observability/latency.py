"""How long requests take, finely enough for percentiles of any window.

Prometheus' buckets are few, for a scrape's sake; these are four to the octave, so that a percentile
interpolated in one is off by at most 9 per cent. Fed on the engine thread, once per step.
"""

from collections.abc import Mapping, Sequence

from engine.request import StepOutput
from tiers.histogram import Histogram, Spread

PER_OCTAVE = 4
BOUNDS_S = tuple(0.0005 * 2 ** (step / PER_OCTAVE) for step in range(20 * PER_OCTAVE + 1))
NAMES = ("ttft", "inter_token", "request", "queue", "load", "prefill")
_SECOND = 1e9  # nanoseconds


class Latencies:
    """Histograms by name, from 0.5 ms to 524 s."""

    def __init__(self) -> None:
        self._histograms = {name: Histogram(BOUNDS_S) for name in NAMES}
        self._last_token_ns: dict[tuple[str, int], int] = {}

    def observe(self, outputs: Sequence[StepOutput]) -> None:
        """Engine thread."""
        for output in outputs:
            when = output.timeline
            if output.miss_reasons and when.first_token_ns:
                self._span("ttft", when.arrival_ns, when.first_token_ns)
                self._span("queue", when.arrival_ns, when.admitted_ns)
                self._span("load", when.admitted_ns, when.loaded_ns)
                self._span("prefill", when.loaded_ns, when.first_token_ns)
            if output.tokens:
                self._gap((output.request_id, output.index), when.last_token_ns)
            if output.finish:
                self._last_token_ns.pop((output.request_id, output.index), None)
            if output.last and not output.error:
                self._span("request", when.arrival_ns, when.last_token_ns)

    def spreads(self) -> Mapping[str, Spread]:
        """Any thread."""
        return {name: histogram.spread() for name, histogram in self._histograms.items()}

    def _gap(self, key: tuple[str, int], now_ns: int) -> None:
        before_ns = self._last_token_ns.get(key)
        self._last_token_ns[key] = now_ns
        if before_ns is not None:
            self._span("inter_token", before_ns, now_ns)

    def _span(self, name: str, start_ns: int, end_ns: int) -> None:
        if start_ns and end_ns >= start_ns:
            self._histograms[name].observe((end_ns - start_ns) / _SECOND)


def percentile(counts: Sequence[int], share: float, bounds: Sequence[float] = BOUNDS_S) -> float:
    """The value below which `share` of the values lie, interpolated within its bucket.

    Not a number where there are none. Values above the last bound count as equal to it.
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
