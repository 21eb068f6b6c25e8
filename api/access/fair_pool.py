"""Threads that tenants share, served in turn rather than from one queue.

A plain pool serves in order of arrival, so thirty slow grammars of one tenant would delay every
other tenant's first. The work releases the interpreter lock, so a few threads are enough to keep
the event loop free.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from api.access.shares import Shares
from api.errors import Overloaded

Made = TypeVar("Made")
ENCODERS = 2  # threads
MAX_PENDING = 256  # long texts to tokenise and grammars to compile, under way or waiting


@dataclass(slots=True, eq=False)
class _Call:
    """One piece of work and the future of its result."""

    tenant: str
    work: Callable[[], Any]
    result: "asyncio.Future[Any]"


class FairPool:
    """Runs `num_threads` calls at once. `max_pending` bounds running and waiting calls together.

    Invariant: no thread is idle while a call waits. Event loop only.
    """

    def __init__(self, num_threads: int, *, max_pending: int, name: str, what: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_idle = num_threads
        self._shares = Shares(max_pending)
        self._what = what  # names the work in a refusal: "long prompts wait to be tokenised"
        self._waiting: dict[str, deque[_Call]] = {}  # by tenant, in the order of their turns

    async def run(self, tenant: str, work: Callable[[], Made]) -> Made:
        """The result of `work`, run on a thread. Raises Overloaded, and whatever `work` raises."""
        if not self._shares.take(tenant):
            raise Overloaded(
                f"{self._shares.used} {self._what}, {self._shares.held(tenant)} of them of this "
                "tenant, as many as are allowed; retry shortly."
            )
        call = _Call(tenant, work, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(call)
        self._start()
        try:
            return cast(Made, await call.result)
        finally:
            self._withdraw(call)

    def close(self) -> None:
        """Waits for the running calls."""
        self._threads.shutdown()

    def _start(self) -> None:
        """Gives idle threads their next calls, one tenant after another."""
        while self._num_idle and self._waiting:
            tenant = next(iter(self._waiting))
            calls = self._waiting.pop(tenant)
            call = calls.popleft()
            if calls:
                self._waiting[tenant] = calls  # behind the others
            self._num_idle -= 1
            made = self._threads.submit(call.work)
            made.add_done_callback(partial(self._hand_over, call))

    def _hand_over(self, call: _Call, made: "Future[Any]") -> None:
        """Called on the thread that did the work."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            call.result.get_loop().call_soon_threadsafe(self._end, call, made)

    def _end(self, call: _Call, made: "Future[Any]") -> None:
        self._num_idle += 1
        self._shares.give_back(call.tenant)
        if not call.result.done():
            if (error := made.exception()) is not None:
                call.result.set_exception(error)
            else:
                call.result.set_result(made.result())
        self._start()

    def _withdraw(self, call: _Call) -> None:
        """Removes a waiting call whose caller is gone. A running call continues to its end."""
        calls = self._waiting.get(call.tenant)
        if calls is None or call not in calls:
            return
        calls.remove(call)
        if not calls:
            del self._waiting[call.tenant]
        self._shares.give_back(call.tenant)


def encoder_pool() -> FairPool:
    """The pool for long texts and grammars."""
    what = "long prompts and grammars wait to be prepared"
    return FairPool(ENCODERS, max_pending=MAX_PENDING, name="cachesvc-encode", what=what)
