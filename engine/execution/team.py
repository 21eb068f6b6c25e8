"""Chooses how many threads compute a step on a CPU, by measuring which number is fastest now.

A step has about a thousand short parallel regions. Each ends when its last thread has run. On idle
processors, a second thread halves the time of a long prompt's chunk, and gains a fifth if the step
waits for memory. If anything else needs the processors, even the server's own event loop, every
region waits for the system's scheduler, and the step takes several times as long
(docs/measurements, "Threads"). So each kind of step is occasionally tried with half or twice the
threads, and the faster number is kept.

Equal inputs give equal bits with any number of threads. Engine thread only.
"""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch

from engine.execution.waiting import Waiting
from engine.openmp import num_processors, take_short_turns

SAMPLE = 4  # steps of each size that a trial compares
FIRST_REST = 32  # steps of a kind before its first trial
REST = 128  # and between trials; doubled while trials change nothing
LONGEST_REST = 1024
GAIN = 0.95  # more threads must take less than this share of the time, as they use more processors
HOPELESS = 1.2  # a trial ends if all its steps so far take this many times the usual time
CHANGED = 1.5  # another begins if all steps take this many times as long as at the last trial
LEAST_REST = 32  # the fewest steps before that
ALIKE = 1.25  # steps of a kind have work within this ratio
CALM_S = 1.0  # that others must leave a larger team's processors before it is tried again
ROW_KEYS = 1000  # keys whose attention counts as much work as a row's products


@dataclass(slots=True)
class _Kind:
    """Steps of similar numbers of rows and like work. `size` is their number of threads.
    `crowded_s`: when others last wanted a larger team's processors, or it was given up; None if it
    was tried since. `recent` holds the seconds of the latest."""

    size: int
    crowded_s: float | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLE))
    usual_s: float = 0.0  # at the last trial
    rest: int = FIRST_REST  # steps until the next trial
    last_rest: int = REST // 2
    grows: bool = False  # whether this or the next trial tries more threads
    tried: int | None = None  # the number of threads on trial
    trial: list[float] = field(default_factory=list)


class ThreadTeam:
    """Sets the team size of the thread that calls it. Invariant: 1 <= size <= most."""

    def __init__(
        self,
        most: int | None = None,
        *,
        resize: Callable[[int], None] = torch.set_num_threads,
        clock_s: Callable[[], float] = time.perf_counter,
        waiting: Waiting | None = None,
    ) -> None:
        """`most`: the full size. None means torch's own, or fewer under a quota."""
        self._most = most
        self._resize = resize
        self._clock_s = clock_s
        self._waiting = waiting
        self.size = most or 0
        # By the bit length of their number of rows, and the work of its kind.
        self._kinds: dict[int, dict[int, _Kind]] = defaultdict(dict)
        self._latest: dict[int, _Kind] = {}  # by that bit length
        self._begun: tuple[_Kind, float] | None = None

    def begin(self, num_rows: int, num_keys: int) -> None:
        """Begin a step of `num_rows` rows, which see so many keys."""
        if self._most is None:
            take_short_turns()
            self.size = torch.get_num_threads()
            self._most = min(self.size, num_processors())
        kind = self._kind(num_rows, num_keys)
        if kind.tried is None and kind.rest <= 0 and self._most > 1:
            self._try(kind)
        size = kind.size if kind.tried is None else kind.tried
        if size != self.size:
            self._resize(size)
            self.size = size
        if self._waiting is not None:
            self._waiting.begin(size)
            self._notice_calm(kind, self._waiting)
        self._begun = kind, self._clock_s()

    def end(self) -> None:
        """End the step, whether it succeeded or not."""
        assert self._begun is not None, "no step has begun"
        kind, begun_s = self._begun
        took_s = self._clock_s() - begun_s
        if kind.tried is None:
            kind.recent.append(took_s)
            kind.rest -= 1
            rested = kind.last_rest - kind.rest >= LEAST_REST and len(kind.recent) == SAMPLE
            if rested and min(kind.recent) > CHANGED * kind.usual_s > 0:
                kind.rest = 0
            return
        kind.trial.append(took_s)
        counted = kind.trial[1:]  # the first selects its kernels anew
        before_s = median(kind.recent)
        if counted and min(kind.trial) > HOPELESS * before_s:  # one may have been interrupted
            self._judge(kind, before_s, min(kind.trial))
        elif len(counted) == SAMPLE:
            self._judge(kind, before_s, median(counted))

    def _kind(self, num_rows: int, num_keys: int) -> _Kind:
        """The step's kind. A new one has the size of the latest with as many rows.

        The chunks of a long prompt take longer and longer, and the next prompt's first take a third
        of its last. Compared with those, they would be faster with any size.
        """
        assert self._most is not None
        rows = num_rows.bit_length()
        work = round(math.log(num_rows * ROW_KEYS + num_keys, ALIKE))
        kind = self._kinds[rows].get(work)
        if kind is None:
            latest = self._latest.get(rows)
            kind = _Kind(self._most) if latest is None else _Kind(latest.size, latest.crowded_s)
            self._kinds[rows][work] = kind
        self._latest[rows] = kind
        return kind

    def _notice_calm(self, kind: _Kind, waiting: Waiting) -> None:
        """Try a larger team soon if others have left, instead of after the whole rest."""
        assert self._most is not None
        if kind.size == self._most or kind.tried is not None:
            return
        now_s = self._clock_s()
        if not waiting.leaves(min(2 * kind.size, self._most)):
            kind.crowded_s = now_s
        elif kind.crowded_s is not None and now_s - kind.crowded_s > CALM_S:
            kind.crowded_s = None
            kind.grows = True
            kind.rest = 0

    def _try(self, kind: _Kind) -> None:
        assert self._most is not None
        if kind.size in (1, self._most):
            kind.grows = kind.size == 1
        kind.tried = min(2 * kind.size, self._most) if kind.grows else kind.size // 2
        kind.trial.clear()

    def _judge(self, kind: _Kind, before_s: float, trial_s: float) -> None:
        assert kind.tried is not None
        better = trial_s < GAIN * before_s if kind.grows else GAIN * trial_s < before_s
        if better:
            kind.crowded_s = self._clock_s() if kind.tried < kind.size else None
            kind.size = kind.tried
            kind.recent = deque(kind.trial[1:], maxlen=SAMPLE)
            kind.last_rest = REST
        else:
            kind.last_rest = min(2 * kind.last_rest, LONGEST_REST)
            kind.grows = not kind.grows
        kind.usual_s = min(trial_s, before_s)
        kind.rest = kind.last_rest
        kind.tried = None
