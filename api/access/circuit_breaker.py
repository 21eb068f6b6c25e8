"""Leaves a failing store of limits alone for a while.

One request waits for the store in vain, instead of every request. Limits are off meanwhile. Event
loop only.
"""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PAUSE_S = 3.0


class CircuitBreaker:
    """Opens at a failure and stays open for `PAUSE_S` after the latest one."""

    def __init__(self, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._until_s = float("-inf")

    @property
    def lasts(self) -> bool:
        return self._clock_s() < self._until_s

    def begin(self, error: Exception) -> None:
        if not self.lasts:
            logger.warning("limits are off for %s s: their store fails: %s", PAUSE_S, error)
        self._until_s = self._clock_s() + PAUSE_S
