"""How many threads compute a step on a CPU: all of them, or fewer while others use the processors.

A step is some thousand short parallel regions, and each ends when its last thread has run. Where
another process holds a processor, every region waits for the scheduler: two threads beside two busy
processes were eight times slower than one (docs/measurements, "Threads"). So the team is halved
while its threads wait for the processors, and doubled again once as many stand idle. Waiting for
Python's lock does not count: then other threads of the server run, and a whole team is faster.
Equal inputs give equal bits whatever the size. Engine thread only.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

WINDOW_S = 0.2  # of steps, after which the team is judged
CROWDED = 0.75  # a team whose thread gets less of the time that it asks of its processor is
# halved: regions that need both of two threads then wait for half of the time, and one thread is as
# fast
IDLE = 0.8  # of each processor that a team takes, while it was smaller
REST_S = 1.0  # before a team that was halved may grow; doubled each time that growing was in vain
LOOK_S = 1.0  # between two looks at what idles: what was busy before a look does not count after it
LONGEST_REST_S = 64.0
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class ThreadTeam:
    """Sizes the team of the thread that calls it. Invariant: 1 <= size <= most."""

    def __init__(
        self,
        most: int | None = None,
        *,
        resize: Callable[[int], None] = torch.set_num_threads,
        clock_s: Callable[[], float] = time.perf_counter,
        cpu_s: Callable[[], float] = time.thread_time,
        queued_s: Callable[[], float | None] | None = None,
        idle_s: Callable[[], float | None] | None = None,
    ) -> None:
        """most: the full size, torch's own where None. cpu_s: what this thread has computed.
        queued_s: what it has waited for a processor, idle_s: what all processors have idled, None
        where the system does not tell."""
        self._most = most
        self._resize = resize
        self._clock_s = clock_s
        self._cpu_s = cpu_s
        self._queued_s = queued_s or thread_queued_s
        self._idle_s = idle_s or processors_idle_s
        self.size = most or 0
        self._rest_s = REST_S
        self._halved_s = 0.0  # when it was last
        self._has_grown = False  # since then
        self._marked: tuple[float, float | None] = (0.0, None)  # the clock, and what idled by then
        self._begun: tuple[float, float, float | None] = (0.0, 0.0, None)
        self._wall_s = 0.0
        self._computed_s = 0.0
        self._asked_s = 0.0  # what it has computed or would have

    def begin(self) -> None:
        """A step begins."""
        if self._most is None:
            self._most = self.size = torch.get_num_threads()
        now_s = self._clock_s()
        if self.size < self._most and now_s - self._marked[0] >= LOOK_S:
            self._look_up(now_s)
        self._begun = now_s, self._cpu_s(), self._queued_s()

    def end(self) -> None:
        """It has ended, well or not."""
        begun_s, cpu_s, before_s = self._begun
        wall_s, computed_s = self._clock_s() - begun_s, self._cpu_s() - cpu_s
        queued_s = self._queued_s()
        self._wall_s += wall_s
        self._computed_s += computed_s
        if queued_s is None or before_s is None:
            self._asked_s += wall_s
        else:
            self._asked_s += computed_s + queued_s - before_s
        if self._wall_s < WINDOW_S:
            return
        crowded = self._computed_s < CROWDED * self._asked_s
        self._wall_s = self._computed_s = self._asked_s = 0.0
        if self.size == 1:
            return
        if crowded:
            self._set(self.size // 2)
            if self._has_grown:
                self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
            self._has_grown = False
            self._halved_s = self._clock_s()
            self._mark(self._halved_s)
        else:
            self._rest_s = max(REST_S, self._rest_s / 2)

    def _look_up(self, now_s: float) -> None:
        """Grow, where as many processors have idled since the last look as the team would take."""
        assert self._most is not None
        since_s, before_s = self._marked
        self._mark(now_s)
        size, idle_s = min(2 * self.size, self._most), self._marked[1]
        enough_s = IDLE * (size - self.size) * (now_s - since_s)
        if now_s - self._halved_s < self._rest_s:
            return
        if idle_s is None or before_s is None or idle_s - before_s >= enough_s:
            self._has_grown = True
            self._set(size)

    def _mark(self, now_s: float) -> None:
        self._marked = (now_s, self._idle_s())

    def _set(self, size: int) -> None:
        what = "are free again" if size > self.size else "are busy with other work"
        logger.info("processors %s: steps compute with %d of %s threads", what, size, self._most)
        self._resize(size)
        self.size = size
        self._wall_s = self._computed_s = self._asked_s = 0.0


def thread_queued_s() -> float | None:
    """What this thread has waited for a processor while it could have run."""
    try:
        ran_ns, queued_ns, slices = map(
            int, Path("/proc/thread-self/schedstat").read_text().split()
        )
    except (OSError, ValueError):  # not Linux, or a kernel that does not count
        return None
    return queued_ns / 1e9 if ran_ns or slices else None


def processors_idle_s() -> float | None:
    """What the processors of this process have idled since the system started, together."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        ours = {f"cpu{number}" for number in os.sched_getaffinity(os.getpid())}
    except (OSError, AttributeError):  # not Linux
        return None
    fields = (line.split() for line in lines if line.startswith("cpu"))
    return sum(int(each[4]) + int(each[5]) for each in fields if each[0] in ours) / TICKS
