"""Touches free frames ahead of need. The system hands out shared memory in pages of 4 KiB, at 1.5
GB/s (measured on an AMD EPYC, 2026-11): a block that loads would wait longer for its frame's memory
than for its bytes.
"""

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from tiers.blocks.lazy_memory import populate
from tiers.node.arena import SharedArena

logger = logging.getLogger(__name__)

REST_S = 0.5  # after a load: who asked for it computes now, and needs the processors


class SpareFrames:
    """Keeps an arena's spare frames touched, one after the other on a thread of its own. It is no
    nicer than the node's, which would wait for it: it may have the GIL."""

    def __init__(
        self,
        arena: SharedArena,
        wake: Callable[[], None],
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wake` wakes the node's thread. Any thread may call it."""
        self._arena = arena
        self._wake = wake
        self._clock_s = clock_s
        self._rests_until_s = float("-inf")
        self._asked: SimpleQueue[int | None] = SimpleQueue()
        self._touching: int | None = None
        self._is_done = False
        self._can_touch = True
        self._thread = threading.Thread(target=self._serve, name="cachesvc-touch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def step(self, *, is_loading: bool) -> None:
        """Ask for the next frame once the last one is touched, unless blocks load, or just did:
        they and what is computed with them need the processors more. The node's thread, at least
        once a second."""
        now_s = self._clock_s()
        if is_loading:
            self._rests_until_s = now_s + REST_S
        if self._touching is not None:
            if not self._is_done:
                return
            self._arena.touched(self._touching)
        may_touch = self._can_touch and now_s >= self._rests_until_s
        self._touching = self._arena.untouched() if may_touch else None
        if self._touching is not None:
            self._is_done = False
            self._asked.put(self._touching)

    def close(self) -> None:
        """End the thread. The memory must still be mapped."""
        self._asked.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (number := self._asked.get()) is not None:
            memory = self._arena.memory
            start = memory.rows.data_ptr() + number * memory.stride
            self._can_touch = populate(start, memory.stride)
            if not self._can_touch:
                logger.debug("frames are not touched ahead of need: the system cannot")
            self._is_done = True
            self._wake()
