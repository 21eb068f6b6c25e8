"""The thread pool that tokenises long texts, with a bound on what may wait for it.

Its owner (`cachesvc.service`) makes and shuts it down; the event loop submits. Tokenisers release
the interpreter lock while they work, so a few threads keep the loop free.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from api.errors import Overloaded

Given = ParamSpec("Given")
Made = TypeVar("Made")


class EncoderPool(ThreadPoolExecutor):
    """A thread pool that refuses work beyond `max_pending` running and waiting calls."""

    def __init__(self, num_threads: int = 2, *, max_pending: int = 256) -> None:
        super().__init__(num_threads, thread_name_prefix="cachesvc-encode")
        self._max_pending = max_pending
        self._pending = 0
        self._lock = threading.Lock()

    def submit(
        self, fn: Callable[Given, Made], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> "Future[Made]":
        with self._lock:
            if self._pending >= self._max_pending:
                raise Overloaded(
                    f"{self._pending} long prompts wait to be tokenised, as many as are allowed; "
                    "retry shortly."
                )
            self._pending += 1
        try:
            future = super().submit(fn, *args, **kwargs)
        except BaseException:
            self._done()
            raise
        future.add_done_callback(lambda _: self._done())
        return future

    def _done(self) -> None:
        with self._lock:
            self._pending -= 1
