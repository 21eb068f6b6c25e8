"""The engine's interface over vLLM's `AsyncLLM`, which one thread with an event loop owns.

    submit ─► VllmRequests ─► AsyncLLM ─► on_outputs

vLLM's engine core and workers are processes. If they die, the engine has failed: requests in flight
end with an error, and the server exits so that a supervisor restarts it.
"""

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from cachesvc.server.vllm.counts import EngineCounts
from cachesvc.server.vllm.generate import VllmSettings
from cachesvc.server.vllm.generate import generate as vllm_generate
from cachesvc.server.vllm.params import check_served
from cachesvc.server.vllm.requests import Generate, VllmRequests
from cachesvc.vllm.reports import Reports
from engine.engine import EngineStats
from engine.errors import (
    EmptyPrompt,
    EngineClosed,
    EngineFailed,
    ModelError,
    PromptTooLong,
    QueueFull,
    UnknownAdapter,
)
from engine.request import FinishReason, Request, StepOutput
from tiers.operations.face import CacheOperations
from tiers.stats import CacheStats

logger = logging.getLogger(__name__)

HEALTH_S = 0.5  # interval of vLLM's health checks
SHUTDOWN_S = 30.0
T = TypeVar("T")


class VllmEngine:
    """Serves requests until closed. Invariant: every submitted request gets one `last` output."""

    def __init__(
        self,
        open_llm: Callable[[Any], Any],
        settings: VllmSettings,
        on_outputs: Callable[[Sequence[StepOutput]], None],
        *,
        reports: Reports | None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        generate: Generate | None = None,
    ) -> None:
        """`open_llm` creates the AsyncLLM on the engine's loop, with a factory of stat loggers.

        `reports` come from the connector; None if vLLM runs without it.
        """
        self._open_llm = open_llm
        self._settings = settings
        self._on_outputs = on_outputs
        self._reports = reports
        self._clock_ns = clock_ns
        self._generate = generate or partial(vllm_generate, settings)
        self._llm: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="cachesvc-engine", daemon=True)
        self._lock = threading.Lock()
        self._submitted: set[str] = set()  # requests in flight; guarded by the lock
        self._arriving: Counter[str] = Counter()  # prompt tokens not begun, by share; by the lock
        self._closing = False
        self.failure: BaseException | None = None  # that ended the engine: it serves nothing more
        self.counts = EngineCounts(self._look_at_backlog)
        self._operations: CacheOperations | None = None
        self._read_cache: Callable[[], CacheStats] | None = None
        self.block_size = 0
        self.max_tokens = 0
        self.vllm_config: Any = None

    # Any thread.

    def open(self) -> None:
        """Starts vLLM and waits until it has loaded the model. Raises ModelError with vLLM's
        reason."""
        opened: Future[None] = Future()
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(opened), self._loop)
        opened.result()

    def use(self, operations: CacheOperations, stats: Callable[[], CacheStats]) -> None:
        """Sets what `call` hands out, and the tiers' stats for `stats`."""
        self._operations, self._read_cache = operations, stats

    def submit(self, request: Request) -> None:
        """Queues a request. Raises like `engine.engine.Engine.submit`."""
        self._check(request)
        with self._lock:
            if self.failure is not None:
                raise EngineFailed(f"the engine has failed: {self.failure}") from self.failure
            if self._closing:
                raise EngineClosed("the engine is shutting down")
            if len(self._submitted) >= self._settings.max_waiting:
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
        return self.counts.begin_rate.backlog(waiting).wait_s(share, num_tokens)

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

    def in_flight(self) -> frozenset[str]:
        """The submitted requests that have not ended."""
        with self._lock:
            return frozenset(self._submitted)

    def forget_prefixes(self) -> "Future[bool]":
        """Makes vLLM empty its prefix cache. Running requests recompute their prefixes."""
        forgetting: Future[bool] = asyncio.run_coroutine_threadsafe(
            self._llm.reset_prefix_cache(reset_running_requests=True), self._loop
        )
        return forgetting

    def stats(self) -> EngineStats:
        assert self._read_cache is not None, "`use` comes before"
        failed = repr(self.failure) if self.failure else None
        return self.counts.stats(self._read_cache(), failed)

    def close(self, drain_s: float = 0.0) -> None:
        """Refuses new requests, lets running ones finish for `drain_s` seconds, then stops vLLM."""
        with self._lock:
            self._closing = True
        give_up = time.monotonic() + drain_s
        while self._submitted and self._thread.is_alive() and time.monotonic() < give_up:
            time.sleep(0.01)
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        if self._reports is not None:
            self._reports.close()

    def _check(self, request: Request) -> None:
        num_tokens = len(request.tokens)
        if num_tokens == 0:
            raise EmptyPrompt("the prompt has no tokens; send at least one")
        if num_tokens >= self.max_tokens:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens, and at most {self.max_tokens - 1} fit the "
                f"model's context with one token to generate; shorten it"
            )
        self._settings.check_params(request.params)
        adapters = self._settings.adapters
        if request.adapter is not None and request.adapter not in adapters:
            served = ", ".join(adapters) or "none"
            raise UnknownAdapter(
                f"no adapter {request.adapter!r} is loaded (loaded: {served})", param="model"
            )
        check_served(request)

    def _post(self, command: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # closed: all requests in flight have ended
            self._loop.call_soon_threadsafe(command)

    # The engine's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        # Ctrl-C reaches every process of the terminal. vLLM's must end only when we say so.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._loop.run_forever()

    async def _open(self, opened: "Future[None]") -> None:
        try:
            self._llm = self._open_llm(lambda config, index=0: self.counts.logger(config, index))
            self.vllm_config = self._llm.vllm_config
            self.max_tokens = self.vllm_config.model_config.max_model_len
            self.block_size = self.vllm_config.cache_config.block_size
            self._requests = VllmRequests(
                self._loop,
                self._llm,
                self._generate,
                self.counts,
                self._on_outputs,
                reports=self._reports,
                clock_ns=self._clock_ns,
                on_begun=self._no_longer_arriving,
                on_over=self._over,
                on_death=self._fail,
            )
            if self._reports is not None:
                self._reports.take()
                self._loop.add_reader(self._reports.socket, self._reports.take)
            self._health = self._loop.create_task(self._watch())
            opened.set_result(None)
        except Exception as error:  # noqa: BLE001 - vLLM's errors have no common root
            opened.set_exception(ModelError(f"vLLM did not start: {error}"))

    async def _watch(self) -> None:
        while not self._llm.errored:  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(HEALTH_S)
        if not self._closing:
            self._fail(self._llm.dead_error)

    async def _close(self) -> None:
        if self._llm is not None:
            await self._requests.close("the server is shutting down")
            self._health.cancel()
            if self._reports is not None:
                self._loop.remove_reader(self._reports.socket)
            await asyncio.to_thread(self._llm.shutdown, SHUTDOWN_S)

    def _no_longer_arriving(self, request: Request) -> None:
        with self._lock:
            self._arriving[request.share] -= len(request.tokens)
            if not self._arriving[request.share]:
                del self._arriving[request.share]

    def _over(self, request: Request) -> None:
        with self._lock:
            self._submitted.discard(request.request_id)

    def _fail(self, error: BaseException) -> None:
        """vLLM has died: this server can serve no more requests."""
        if self.failure is not None or self._closing:
            return
        logger.critical(f"the engine has failed: {error!r}")
        with self._lock:
            self.failure = error
        self._requests.fail(f"the engine has failed: {error}")

    def _look_at_backlog(self) -> None:
        """Called once per vLLM step."""
        with self._lock:
            waiting = Counter(self._arriving)
        self.counts.begin_rate.look(self._clock_ns(), waiting)
