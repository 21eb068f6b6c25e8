"""A circuit breaker: stops calls to a failing store or engine for a while, so that requests do not
wait for it."""

import threading
import time
from collections.abc import Callable

FAILURES = 3  # in a row
FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 60.0


class Breaker:
    """Closed, or open until a given time. Then the outcome of one call decides. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._pause_s = 0.0
        self._until_s = 0.0
        self.num_opened = 0

    @property
    def is_open(self) -> bool:
        return self._clock() < self._until_s

    @property
    def is_tripped(self) -> bool:
        """Open, or no call has succeeded since it was."""
        return self._pause_s > 0

    def allows(self) -> bool:
        """Whether to make a call now. After a pause, only one caller may try."""
        with self._lock:
            now = self._clock()
            if now < self._until_s:
                return False
            if self._pause_s:
                self._until_s = now + self._pause_s  # the others wait for the outcome of this call
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._num_failures = 0
            self._pause_s = self._until_s = 0.0

    def failed(self) -> None:
        with self._lock:
            self._num_failures += 1
            if self._num_failures < FAILURES:
                return
            self._pause_s = min(MOST_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
            self._until_s = self._clock() + self._pause_s
            self.num_opened += 1
