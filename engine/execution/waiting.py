"""Decides how a team's threads wait for each other on a CPU: by spinning, or soon by sleeping.

A step has about a thousand short parallel regions. At the end of each, threads wait for the last
one. While nothing else needs the processors, spinning is fastest. Otherwise a spinning thread takes
the processor that the awaited thread needs: beside six busy processes, a prompt of 512 tokens took
30 times as long (docs/measurements, "Threads"). So the threads spin only while other processes
leave them their processors.

libgomp has no call for this, but a rule: while all its teams together have more threads than there
are processors, a waiting thread looks at most 1,000 times before it sleeps, and otherwise as often
as GOMP_SPINCOUNT says. So a second team that computes nothing makes the first one sleep soon. With
another OpenMP it changes nothing. Equal inputs give equal bits either way. Engine thread only.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from engine.openmp import allowed_processors

WINDOW_S = 0.2  # the shortest time over which use is judged; the system counts in 10 ms
CROWDED = 0.3  # processors that others may use of the team's before its threads sleep soon
QUIET = 0.15  # and before they spin again
LOOKS, LOOK_S = 4, 0.0005  # at what runs now, and the pause between two of them
_GRAIN = 1 << 15  # elements for which torch adds a thread
_STAT, _LOAD = Path("/proc/stat"), Path("/proc/loadavg")


class Waiting:
    """How the team of the thread that calls it waits. Invariant: while other processes were last
    seen to use the team's processors, it does not spin."""

    def __init__(
        self,
        *,
        others_s: Callable[[], float | None] | None = None,
        running: Callable[[], int | None] | None = None,
        clock_s: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`others_s`: how long other processes have used this one's processors, in seconds since
        any moment. `running`: how many threads of the whole system run or want to, this one among
        them. None if the system does not tell."""
        self._others_s = others_s or others_used_s
        self._running = running or num_running
        self._clock_s = clock_s
        self._pause = pause
        self._second: _SecondTeam | None = None
        self._window = clock_s(), self._others_s()
        self._used = 0.0  # processors that others used in the last window

    @property
    def spins(self) -> bool:
        return self._second is None

    def leaves(self, size: int) -> bool:
        """Whether others, when last seen, left a processor for each of `size` threads."""
        return self._taken(size) < QUIET

    def begin(self, size: int) -> None:
        """Begin a step with a team of `size` threads."""
        now_s, (begun_s, before_s) = self._clock_s(), self._window
        if now_s - begun_s < WINDOW_S:
            return
        used_s = self._others_s()
        self._window = now_s, used_s
        if used_s is None or before_s is None:
            return
        self._used = (used_s - before_s) / (now_s - begun_s)
        taken = self._taken(size)
        if taken > CROWDED and self._crowded_now(size):
            self._sleep_soon(size)
        elif taken < QUIET or taken > CROWDED:
            self._spin()

    def _taken(self, size: int) -> float:
        """Processors that others used of those that a team of `size` threads needs."""
        return self._used - len(allowed_processors()) + size

    def _crowded_now(self, size: int) -> bool:
        """Whether others still want the team's processors. A window may end long before a step: an
        engine that was idle saw a neighbour that has gone.

        They want them at each of a few looks. At the first, whoever brought the request often still
        runs: the client, or this server's own event loop.
        """
        for look in range(LOOKS):
            if look:
                self._pause(LOOK_S)
            running = self._running()
            if running is None:
                return True
            if running - 1 + size <= (os.cpu_count() or 1):
                return False
        return True

    def _spin(self) -> None:
        if self._second is not None:
            self._second.end()
            self._second = None

    def _sleep_soon(self, size: int) -> None:
        if self._second is None and size > 1:
            self._second = _SecondTeam(max(2, len(allowed_processors())))


class _SecondTeam:
    """A thread with a team of `size` threads, all asleep. They end with `end`, or with this."""

    def __init__(self, size: int) -> None:
        there, done = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=_hold_team, args=(size, there, done), name="cachesvc-second-team", daemon=True
        )
        self._thread.start()
        self._release = weakref.finalize(self, done.set)
        there.wait()

    def end(self) -> None:
        self._release()
        self._thread.join()


def _hold_team(size: int, there: threading.Event, done: threading.Event) -> None:
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(size)  # of this thread, and of those that ask for the first time
        torch.zeros(size * _GRAIN)
    finally:
        torch.set_num_threads(usual)
        there.set()
    done.wait()


def num_running() -> int | None:
    """How many threads of the whole system run or want to. None if the system does not tell."""
    try:
        return int(_LOAD.read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return None


def others_used_s() -> float | None:
    """How long other processes have used the processors that this one may use, since the system
    started. Includes what a hypervisor gave to others. None if the system does not tell."""
    allowed, ticks = allowed_processors(), 0
    try:
        for line in _STAT.read_text().splitlines():
            name, *counts = line.split()
            if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in allowed:
                user, nice, system, _, _, *rest = map(int, counts[:8])
                ticks += user + nice + system + sum(rest)
    except (OSError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time() if ticks else None
