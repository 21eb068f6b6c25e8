"""Says in the log that blocks left memory while no tier below had them, and why.

Called by `Residency` where there is a tier below. Engine thread only.
"""

import logging
import time
from collections.abc import Callable

from tiers.memory.block import Below, Block

logger = logging.getLogger(__name__)

SAY_EVERY_S = 60.0


class LossLog:
    """At most one line in `SAY_EVERY_S`, with the number since the last line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_s = -SAY_EVERY_S
        self._num_unwritten = self._num_refused = 0

    def note(self, block: Block) -> None:
        """This block is about to be forgotten, and its last copy with it."""
        if block.below is Below.REFUSED:
            self._num_refused += 1
        else:
            self._num_unwritten += 1
        now_s = self._clock()
        if now_s - self._said_s < SAY_EVERY_S:
            return
        self._said_s = now_s
        hint = "; a larger cache.host_bytes gives the writer more time"
        logger.warning(
            f"{self._num_unwritten + self._num_refused} block(s) left memory and are not on disk, "
            f"so they are computed again when needed (not written yet: {self._num_unwritten}, "
            f"not taken by the disk: {self._num_refused}){hint if self._num_unwritten else ''}. "
            f"This is said once in {SAY_EVERY_S:.0f} s; cachesvc_cache_events_total counts all"
        )
        self._num_unwritten = self._num_refused = 0
