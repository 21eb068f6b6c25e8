"""The server's recent history: every number of its snapshot, each second, in bounded memory.

Four rings hold fifteen minutes by the second, three hours by ten seconds, a day by the minute and a
week by ten minutes. A series is an expression over the snapshot's paths, so a page chooses what it
draws and nothing is declared twice:

    value:engine.num_running              the value at each time
    rate:traffic.generation_tokens        growth of a counter per second
    delta:cache.events.host.stored        growth of a counter, from one time to the next
    ratio:a.hits+b.hits/a.asked           ratio of growths; null if the lower one did not grow
    p95:latency.ttft                      percentile of the observations in between, in seconds

`a+b` is a sum, and a path with `*` the sum of all that match. The plurals `values:`, `rates:` and
`deltas:` of such a path are one series for each that matches.
Event loop only.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import isnan
from typing import Any

import numpy as np
import numpy.typing as npt

from api.errors import InvalidRequest
from billing.clock import NS, boot_timer_ns
from cachesvc.observability.latency import BOUNDS_S, NAMES, percentile
from cachesvc.observability.snapshot import numbers
from tiers.histogram import Spread

RINGS = ((1, 900), (10, 1080), (60, 1440), (600, 1008))  # seconds between samples, and how many
MAX_POINTS = 120  # of one answer; more would show noise
DIGITS = 5  # significant digits of an answer's numbers

Floats = npt.NDArray[np.float64]
_SERIES = re.compile(r"(values?|rates?|deltas?|ratio|p\d{1,2}):(.+)")


def _steady_clock() -> Callable[[], float]:
    """The time as the host says it now, continued by a timer that nobody sets: samples are found by
    their times, which must ascend."""
    began_s = time.time() - boot_timer_ns() / NS
    return lambda: began_s + boot_timer_ns() / NS


class _Ring:
    """The latest samples, `step` seconds apart. Columns are added as names appear."""

    def __init__(self, step: int, capacity: int) -> None:
        self.step = step
        self.capacity = capacity
        self.count = 0  # samples ever written
        self.times: Floats = np.zeros(capacity)
        self.values: Floats = np.zeros((capacity, 64))
        self.spreads = np.zeros((capacity, len(NAMES), len(BOUNDS_S) + 1), np.uint32)

    def add(self, time_s: float, row: Floats, spreads: npt.NDArray[np.uint32]) -> None:
        if len(row) > self.values.shape[1]:
            wider = np.zeros((self.capacity, 2 * len(row)))
            wider[:, : self.values.shape[1]] = self.values
            self.values = wider
        place = self.count % self.capacity
        self.times[place] = time_s
        self.values[place, : len(row)] = row
        self.spreads[place] = spreads
        self.count += 1

    def stride(self, window_s: float) -> int:
        """Every how many samples a point is shown: of the window, or of what there is of it."""
        held = min(int(window_s / self.step), self.count, self.capacity)
        return max(1, -(-held // MAX_POINTS))

    def pick(self, window_s: float, since_s: float) -> npt.NDArray[np.int64]:
        """Indices of the samples to show, after that of the sample from which growth counts.

        Takes every nth sample by its number, so that the next answer continues this one.
        """
        stride = self.stride(window_s)
        oldest = max(0, self.count - self.capacity)
        picked = np.arange(-(-oldest // stride) * stride, self.count, stride)
        times = self.times[picked % self.capacity]
        now_s = self.times[(self.count - 1) % self.capacity] if self.count else 0.0
        wanted = int(np.searchsorted(times, max(now_s - window_s, since_s), "right"))
        return picked[max(0, wanted - 1) :] % self.capacity

    def ends(self, window_s: float) -> npt.NDArray[np.int64]:
        """Indices of the window's first and last sample; none for an empty ring."""
        places = np.arange(max(0, self.count - self.capacity), self.count) % self.capacity
        times = self.times[places]
        return places[times >= times[-1] - window_s][[0, -1]] if len(times) else places


class History:
    """Samples of `read` (the snapshot) and `spreads` (the latencies)."""

    def __init__(
        self,
        read: Callable[[], Mapping[str, Any]],
        spreads: Callable[[], Mapping[str, Spread]],
        *,
        clock_s: Callable[[], float] | None = None,
    ) -> None:
        self._snapshot = read
        self._spreads = spreads
        self._clock_s = clock_s or _steady_clock()
        self._columns: dict[str, int] = {}
        self._rings = [_Ring(step, capacity) for step, capacity in RINGS]
        self._ticks = 0

    def sample(self) -> None:
        """Takes one sample, in about 0.4 ms. Called each second."""
        row = self._row()
        found = self._spreads()
        spreads = np.array([found[name].counts for name in NAMES], np.uint32)
        now_s = self._clock_s()
        for ring in self._rings:
            if self._ticks % ring.step == 0:
                ring.add(now_s, row, spreads)
        self._ticks += 1

    def read(
        self, series: Sequence[str], *, window_s: float, since_s: float = 0.0
    ) -> dict[str, Any]:
        """`{"step_s", "times", "series": {name: values}}` of the last `window_s` seconds.

        With `since_s`, only newer samples. Raises InvalidRequest for an invalid expression.
        """
        ring = self._finest(window_s)
        picked = ring.pick(window_s, since_s)
        view = self._view(ring, picked)
        return {
            "step_s": ring.step * ring.stride(window_s),
            "times": [round(each, 1) for each in view.times.tolist()],
            "series": view.series(series),
        }

    def over(self, series: Sequence[str], *, window_s: float) -> dict[str, float | None]:
        """Each series as one number for the whole window.

        For `value:` it is the current value.
        """
        ring = self._finest(window_s)
        found = self._view(ring, ring.ends(window_s)).series(series)
        return {name: each[-1] if each else None for name, each in found.items()}

    def _view(self, ring: _Ring, places: npt.NDArray[np.int64]) -> "_View":
        return _View(self._columns, ring.times[places], ring.values[places], ring.spreads[places])

    def _finest(self, window_s: float) -> _Ring:
        """The finest ring that reaches back as far, or that nothing has left yet."""
        for ring in self._rings:
            if ring.step * ring.capacity >= window_s or ring.count < ring.capacity:
                return ring
        return self._rings[-1]

    def _row(self) -> Floats:
        found = dict(numbers(self._snapshot()))
        for name in found:
            self._columns.setdefault(name, len(self._columns))
        row = np.zeros(len(self._columns))
        for name, value in found.items():
            row[self._columns[name]] = value
        return row


class _View:
    """Some samples of a ring, and series over them. Growth counts from the first."""

    def __init__(
        self, columns: Mapping[str, int], times: Floats, values: Floats, spreads: npt.NDArray[Any]
    ) -> None:
        self._columns = columns
        self._values = values
        self._spreads = spreads
        self._times = times
        self.times = times[1:]

    def series(self, texts: Iterable[str]) -> dict[str, list[float | None]]:
        """The values of each by its name. Raises InvalidRequest."""
        found = (named for text in texts for named in self._evaluate(text))
        return {name: _json_numbers(each) for name, each in found}

    def _evaluate(self, text: str) -> Iterator[tuple[str, Floats]]:
        parsed = _SERIES.fullmatch(text)
        if parsed is None:
            raise InvalidRequest(
                f"{text!r} is not a series: write value:, rate:, delta:, ratio: or p50: and a path "
                "of /admin/api/stats, such as rate:traffic.generation_tokens",
                param="series",
            )
        kind, expression = parsed.groups()
        if kind.startswith("p"):
            yield text, self._percentile(expression, int(kind[1:]) / 100)
        elif kind == "ratio":
            yield text, self._ratio(expression)
        elif kind.endswith("s"):
            for name in self._matching(expression):
                yield f"{kind[:-1]}:{name}", self._plain(kind[:-1], self._column(name))
        else:
            yield text, self._plain(kind, self._sum(expression))

    def _plain(self, kind: str, values: Floats) -> Floats:
        if kind == "value":
            return values[1:]
        growth = np.maximum(0.0, np.diff(values))
        return growth if kind == "delta" else growth / np.maximum(1e-3, np.diff(self._times))

    def _ratio(self, expression: str) -> Floats:
        upper, _, lower = expression.partition("/")
        below = np.diff(self._sum(lower))
        ratio: Floats = np.full(len(below), np.nan)
        np.divide(np.maximum(0.0, np.diff(self._sum(upper))), below, out=ratio, where=below > 0)
        return ratio

    def _percentile(self, path: str, share: float) -> Floats:
        name = path.removeprefix("latency.")
        if name not in NAMES:
            known = ", ".join(f"latency.{each}" for each in NAMES)
            raise InvalidRequest(
                f"there are no percentiles of {path!r}, only of {known}", param="series"
            )
        counts = np.diff(self._spreads[:, NAMES.index(name)].astype(np.int64), axis=0)
        return np.array([percentile(row.tolist(), share) for row in counts])

    def _sum(self, expression: str) -> Floats:
        total: Floats = np.zeros(len(self._times))
        for path in expression.split("+"):
            for name in self._matching(path) if "*" in path else (path,):
                total = total + self._column(name)
        return total

    def _column(self, name: str) -> Floats:
        """A column. A name that has not appeared yet is a counter at 0."""
        column = self._columns.get(name, self._values.shape[1])
        if column >= self._values.shape[1]:
            return np.zeros(len(self._times))
        return self._values[:, column]

    def _matching(self, pattern: str) -> list[str]:
        return [name for name in self._columns if fnmatchcase(name, pattern)]


def _json_numbers(values: Floats) -> list[float | None]:
    """Rounded values, with None for NaN, as short JSON."""
    rounded = (float(f"{each:.{DIGITS}g}") for each in values.tolist())
    return [None if isnan(each) else int(each) if each == int(each) else each for each in rounded]
