"""Predicts the time to first token from the requests this machine has served.

Requests are grouped by computed tokens, in powers of two. The latest of a group give its range.
Event loop only.
"""

from collections import deque
from collections.abc import Sequence

from api.job import Served
from billing.gate.outcomes import Outcome

MAX_SAMPLES = 64  # latest samples of each group
MIN_SAMPLES = 3
LOW, HIGH = 0.1, 0.9  # the quantiles that are shown


class Forecast:
    """Seconds from admission to the first token, by computed tokens."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[int, float]]] = {}

    def observe(self, served: Served) -> None:
        when = served.timeline
        if served.outcome is not Outcome.FINISHED or not (when.admitted_ns and when.first_token_ns):
            return
        miss = max(1, served.usage.miss)
        samples = self._samples.setdefault(miss.bit_length(), deque(maxlen=MAX_SAMPLES))
        samples.append((miss, (when.first_token_ns - when.admitted_ns) / 1e9))

    def range_s(self, miss_tokens: int) -> tuple[float, float] | None:
        """The usual range for `miss_tokens` to compute; None if no similar request was served.

        Taken from requests of the nearest size and scaled in proportion.
        """
        known = {size: each for size, each in self._samples.items() if len(each) >= MIN_SAMPLES}
        if not known:
            return None
        wanted = max(1, miss_tokens).bit_length()
        size = min(known, key=lambda other: abs(other - wanted))
        if size == wanted:
            took = sorted(seconds for _, seconds in known[size])
        else:
            took = sorted(seconds * miss_tokens / miss for miss, seconds in known[size])
        return _quantile(took, LOW), _quantile(took, HIGH)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]
