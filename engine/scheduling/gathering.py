"""Decides whether a step waits a moment for requests that usually follow the answers just given.

Clients that ask again at once come while the next step runs. If that one holds a single request,
they wait for it, and then the single one waits for them: two steps for what one could compute. So
it is learned how long after so many answers most of as many requests come. A step waits if that
costs those who wait less than a step would cost those who come. Requests that come at random are
never many enough in that time (docs/measurements/compute.md, "A small cached request").

Engine thread only. Times are in seconds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

MOST_S = 0.1  # no step waits longer
MOSTLY = 0.75  # the part of the expected requests that must come for a wait to be worth it
PATIENCE = 1.5  # how long a step waits for all of them, in times of what most of them take
SMOOTHING = 0.5


@dataclass(slots=True)
class Answered:
    """A step's answers, and when requests came after them, until the next step's answers."""

    at_s: float
    num: int = 0
    step_s: float = 0.0
    came_s: list[float] = field(default_factory=list)

    def mostly_s(self) -> float:
        """How long it took until most of as many requests had come, at most `MOST_S`."""
        enough = math.ceil(MOSTLY * self.num)
        if len(self.came_s) < enough:
            return MOST_S
        return min(MOST_S, sorted(self.came_s)[enough - 1] - self.at_s)


class Gathering:
    """How long after so many answers requests come."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._last = Answered(clock_s())
        self._before: Answered | None = None  # until what came in its time is known
        self._usual_s: dict[int, float] = {}  # `mostly_s`, by the bits of the number of answers

    def answered(self, num: int, step_s: float) -> None:
        """Note that a step ended, and so many requests with it."""
        self._before, self._last = self._last, Answered(self._clock_s(), num, step_s)

    def came(self, at_s: float) -> None:
        """Note a request that was submitted at this time, perhaps while the last step ran."""
        after = self._last
        if self._before is not None and at_s < after.at_s:
            after = self._before
        if len(after.came_s) < after.num:  # more are not needed, however many come without a step
            after.came_s.append(at_s)

    def left_s(self, num_waiting: int) -> float:
        """How long the next step should still wait, while so many requests do. 0: it begins."""
        self._learn()
        last = self._last
        num_behind = num_waiting - len(last.came_s)  # they were there before the answers
        if len(last.came_s) >= last.num:
            return 0.0
        worth_s = last.step_s * last.num / (last.num + max(1, num_behind))
        usual_s = self._usual_s.get(last.num.bit_length(), MOST_S)
        if usual_s >= min(MOST_S, worth_s):
            return 0.0
        return max(0.0, last.at_s + min(MOST_S, worth_s, PATIENCE * usual_s) - self._clock_s())

    def _learn(self) -> None:
        before, self._before = self._before, None
        if before is None or not before.num:
            return
        kind, seen_s = before.num.bit_length(), before.mostly_s()
        usual_s = self._usual_s.get(kind, seen_s)
        self._usual_s[kind] = usual_s + SMOOTHING * (seen_s - usual_s)
