"""A store of limits that fails is left alone for a while, so that one request waits for it in vain
and not each. Limits are off meanwhile. Event loop only.
"""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PAUSE_S = 3.0


class CircuitBreaker:
    """Begins with a failure, and lasts `PAUSE_S` from the latest one."""

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
