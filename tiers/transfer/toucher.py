"""The thread that touches memory before blocks and working copies need it.

It begins while the model is prepared, with what the first prompts need. Then it follows the engine.
Once nothing was computed for a moment, it touches until `AHEAD_BYTES` beyond
what is used are so. While the engine works it rests, unless half of that is gone. So memory is
taken as tiers fill, and a step seldom waits for the system to hand it out.
"""

import logging
import threading
import time
from collections.abc import Sequence

from tiers.blocks.lazy_memory import AHEAD_BYTES, HUGE_PAGE_BYTES, LazyMemory
from tiers.transfer.niceness import be_nice

logger = logging.getLogger(__name__)

PIECE_BYTES = HUGE_PAGE_BYTES  # touched at once, in 0.2 to 2 ms
PAUSE_S = 0.1  # after the engine's work: the next request often comes at once


class Toucher:
    """Keeps memory touched ahead of need. Invariant: what it touches keeps its contents."""

    def __init__(self, lazy_memories: Sequence[LazyMemory]) -> None:
        self._lazy_memories = [*lazy_memories]  # not touched up to their limits yet
        self._rests_since_s: float | None = None  # the engine, not this thread; None: it works
        self._is_closed = False
        self._first = threading.Event()  # the first bytes of each are touched, or cannot be
        self._untouched: list[LazyMemory] = []  # as the system cannot do it
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="cachesvc-touch", daemon=True)

    def start(self) -> None:
        """Start the thread, which begins with the first bytes of each."""
        self._thread.start()

    def wait(self) -> None:
        """Wait until the first bytes of each are touched. None of them may be wanted yet."""
        self._first.wait()
        if self._untouched:
            logger.info("memory is not touched ahead of need: the system cannot")
        while self._untouched:
            self._untouched.pop().clear()

    def step(self) -> None:
        """Take in that the engine works. The engine thread, once a turn."""
        self._rests_since_s = None
        if self._lazy_memories and self._next(AHEAD_BYTES // 2) is not None:
            self._wake.set()

    def rest(self) -> None:
        """Take in that the engine waits for work. The engine thread."""
        self._rests_since_s = time.monotonic()
        if self._lazy_memories and self._next(AHEAD_BYTES) is not None:
            self._wake.set()

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()
        self._thread.join()

    def _next(self, ahead: int) -> LazyMemory | None:
        """One of which more is to be touched."""
        return next((each for each in self._lazy_memories if each.lacks(ahead)), None)

    def _touch_first(self) -> None:
        for lazy in self._lazy_memories:
            while lazy.num_touched < min(lazy.limit, AHEAD_BYTES) and not self._is_closed:
                if not lazy.touch(PIECE_BYTES):
                    self._untouched, self._lazy_memories = self._lazy_memories, []
                    return

    def _serve(self) -> None:
        self._touch_first()
        self._first.set()
        be_nice(19)
        while self._lazy_memories and not self._is_closed:
            since_s = self._rests_since_s
            left_s = since_s + PAUSE_S - time.monotonic() if since_s is not None else None
            has_paused = left_s is not None and left_s <= 0
            lazy = self._next(AHEAD_BYTES if has_paused else AHEAD_BYTES // 2)
            if lazy is None:
                self._wake.wait(None if has_paused else left_s)
                self._wake.clear()
            elif not lazy.touch(PIECE_BYTES) or lazy.num_touched == lazy.limit:
                self._lazy_memories = [each for each in self._lazy_memories if each is not lazy]
