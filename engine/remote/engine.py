"""The engine's interface over an engine at a URL. One thread with an event loop owns its requests.

    submit ─► RemoteRequests ─► HTTP ─► on_outputs

A fault of the engine fails the requests that meet it. It is no failure of the server unless `fail`
says so: a process that it started has ended.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from engine.engine import EngineStats
from engine.errors import (
    EmptyPrompt,
    EngineClosed,
    EngineFailed,
    PromptTooLong,
    QueueFull,
    UnknownAdapter,
)
from engine.remote.answer import RunningAnswer
from engine.remote.requests import PromptReports, RemoteRequests
from engine.remote.upstreams import Upstream, Upstreams
from engine.request import FinishReason, Request, SamplingParams, StepOutput
from engine.scheduling.shares import BeginRate
from tiers.operations.face import CacheOperations
from tiers.stats import CacheStats

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # interval of looks at the engine's own counters
T = TypeVar("T")


class RemoteEngine:
    """Serves requests until closed. Invariant: every submitted request gets one `last` output."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        on_outputs: Callable[[Sequence[StepOutput]], None],
        *,
        max_waiting: int,
        check_params: Callable[[SamplingParams], None],
        reports: PromptReports | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`reports` come from a connector; None if the engine runs without it."""
        self._upstreams = Upstreams(upstreams)
        self._max_waiting = max_waiting
        self._check_params = check_params
        self._clock_ns = clock_ns
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="cachesvc-engine", daemon=True)
        self._lock = threading.Lock()
        self._submitted: set[str] = set()  # requests in flight; guarded by the lock
        self._arriving: Counter[str] = Counter()  # prompt tokens not begun, by share; by the lock
        self._closing = False
        self._rate = BeginRate()
        self._num_computed = 0
        self._looking: Future[None] = Future()
        self._operations: CacheOperations | None = None
        self._read_cache: Callable[[], CacheStats] | None = None
        self.failure: BaseException | None = None  # that ended the engine: it serves nothing more
        self.max_tokens = min(each.remote.max_tokens for each in upstreams)
        self._requests = RemoteRequests(
            self._loop,
            self._upstreams,
            on_outputs,
            reports=reports,
            clock_ns=clock_ns,
            on_begun=self._begun,
            on_over=self._over,
        )

    # Any thread.

    def use(self, operations: CacheOperations, stats: Callable[[], CacheStats]) -> None:
        """Sets what `call` hands out, and the tiers' stats for `stats`."""
        self._operations, self._read_cache = operations, stats

    def start(self) -> None:
        self._thread.start()
        self._looking = asyncio.run_coroutine_threadsafe(self._look(), self._loop)

    def submit(self, request: Request) -> None:
        """Queues a request. Raises like `engine.engine.Engine.submit`."""
        self._check(request)
        with self._lock:
            if self.failure is not None:
                raise EngineFailed(f"the engine has failed: {self.failure}") from self.failure
            if self._closing:
                raise EngineClosed("the engine is shutting down")
            if len(self._submitted) >= self._max_waiting:
                raise QueueFull(
                    f"{len(self._submitted)} requests are in flight, as many as are allowed; "
                    f"try again later"
                )
            assert request.request_id not in self._submitted, f"{request.request_id} runs already"
            self._submitted.add(request.request_id)
            self._arriving[request.share] += len(request.tokens)
        self._post(lambda: self._requests.begin(request, self.failure))

    def abort(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.ABORT,
        index: int | None = None,
    ) -> None:
        """End a request early, or one sequence of it; the last output says `reason`."""
        self._post(lambda: self._requests.abort(request_id, reason, index))

    def predicted_wait_s(self, share: str, num_tokens: int) -> float:
        """Seconds that a prompt of `share` would wait to begin, at the recent rate."""
        with self._lock:
            waiting = Counter(self._arriving)
        return self._rate.backlog(waiting).wait_s(share, num_tokens)

    def call(self, function: Callable[[CacheOperations], T]) -> "Future[T]":
        """Runs `function` on the engine's thread."""
        future: Future[T] = Future()
        if self.failure is not None:
            future.set_exception(EngineFailed(f"the engine has failed: {self.failure}"))
            return future

        def run() -> None:
            assert self._operations is not None, "`use` comes before"
            try:
                future.set_result(function(self._operations))
            except Exception as error:  # noqa: BLE001 - handed to who asked
                future.set_exception(error)

        self._post(run)
        return future

    def ask(self, method: str, path: str) -> "Future[tuple[int, Any]]":
        """Asks the first engine something beside the requests; see `EngineHttp.ask`."""
        asked = self._upstreams.each[0].http.ask(method, path)
        return asyncio.run_coroutine_threadsafe(asked, self._loop)

    def in_flight(self) -> frozenset[str]:
        """The submitted requests that have not ended."""
        with self._lock:
            return frozenset(self._submitted)

    @property
    def kv_usage(self) -> float:
        """How much of the engines' own caches is in use, 0 to 1."""
        return self._upstreams.total("vllm:kv_cache_usage_perc") / len(self._upstreams.each)

    def stats(self) -> EngineStats:
        assert self._read_cache is not None, "`use` comes before"
        total, num_decoding = self._upstreams.total, self._requests.num_decoding
        return EngineStats(
            num_running=num_decoding,
            num_waiting=max(0, len(self._submitted) - num_decoding),
            num_loading=0,
            num_preemptions=int(total("vllm:num_preemptions_total")),
            num_steps=int(total("vllm:iteration_tokens_total_count")),
            prompt_tokens_computed=self._num_computed,
            jumped_tokens=0,
            cache=self._read_cache(),
            failed=repr(self.failure) if self.failure else None,
            engines=tuple(each.use() for each in self._upstreams.each),
        )

    def fail(self, error: BaseException) -> None:
        """The engine has ended for good: this server can serve no more requests."""
        with self._lock:
            if self.failure is not None or self._closing:
                return
            self.failure = error
        logger.critical(f"the engine has failed: {error!r}")
        self._post(partial(self._requests.fail, f"the engine has failed: {error}"))

    def close(self, drain_s: float = 0.0) -> None:
        """Refuses new requests, lets running ones finish for `drain_s` seconds, and ends the
        rest."""
        with self._lock:
            self._closing = True
        give_up = time.monotonic() + drain_s
        while self._submitted and self._thread.is_alive() and time.monotonic() < give_up:
            time.sleep(0.01)
        if self._thread.is_alive():
            self._looking.cancel()
            ending = self._requests.close("the server is shutting down")
            asyncio.run_coroutine_threadsafe(ending, self._loop).result()
            asyncio.run_coroutine_threadsafe(self._upstreams.close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _check(self, request: Request) -> None:
        num_tokens = len(request.tokens)
        if num_tokens == 0:
            raise EmptyPrompt("the prompt has no tokens; send at least one")
        if num_tokens >= self.max_tokens:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens, and at most {self.max_tokens - 1} fit the "
                f"model's context with one token to generate; shorten it"
            )
        self._check_params(request.params)
        adapters = self._upstreams.each[0].remote.adapters
        if request.adapter is not None and request.adapter not in adapters:
            served = ", ".join(adapters) or "none"
            raise UnknownAdapter(
                f"no adapter {request.adapter!r} is loaded (loaded: {served})", param="model"
            )
        for each in self._upstreams.each:
            each.remote.protocol.check(request)

    def _post(self, command: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # closed: all requests in flight have ended
            self._loop.call_soon_threadsafe(command)

    # The engine's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _look(self) -> None:
        """Asks the engines whether they serve, reads their counters while they have work, and
        measures how fast work begins."""
        idle = False
        while True:
            was_idle, idle = idle, not self._submitted
            await self._upstreams.probe(counting=not (idle and was_idle))
            await asyncio.sleep(LOOK_S)
            self._measure()
            self._requests.take_reports()

    def _measure(self) -> None:
        with self._lock:
            waiting = Counter(self._arriving)
        self._rate.look(self._clock_ns(), waiting)

    def _begun(self, request: Request, begun: bool) -> None:
        with self._lock:
            self._arriving[request.share] -= len(request.tokens)
            if not self._arriving[request.share]:
                del self._arriving[request.share]
        if begun:
            self._rate.begun(request.share, len(request.tokens))
            self._measure()

    def _over(self, answer: RunningAnswer) -> None:
        self._num_computed += answer.counts.miss
        with self._lock:
            self._submitted.discard(answer.request.request_id)
