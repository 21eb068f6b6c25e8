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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import uvloop

from engine.errors import EngineFailed
from engine.intake import Intake
from engine.remote.requests import PromptReports, RemoteRequests
from engine.remote.upstreams import Upstream, Upstreams
from engine.request import FinishReason, Request, StepOutput
from engine.settings import EngineSettings
from engine.stats import EngineStats
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
        settings: EngineSettings,
        *,
        reports: PromptReports | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`reports` come from a connector; None if the engine runs without it."""
        self._upstreams = Upstreams(upstreams)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="cachesvc-engine", daemon=True)
        self._looking: Future[None] = Future()
        self._operations: CacheOperations | None = None
        self._read_cache: Callable[[], CacheStats] | None = None
        self.max_tokens = min(each.remote.max_tokens for each in self._upstreams.found)
        self._intake = Intake(settings, self.max_tokens)
        self._requests = RemoteRequests(
            self._loop,
            self._upstreams,
            self._intake,
            on_outputs,
            end=settings.eos_token_ids,
            reports=reports,
            clock_ns=clock_ns,
        )

    # Any thread.

    def use(self, operations: CacheOperations, stats: Callable[[], CacheStats]) -> None:
        """Sets what `call` hands out, and the tiers' stats for `stats`."""
        self._operations, self._read_cache = operations, stats

    def start(self) -> None:
        self._thread.start()
        self._looking = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def submit(self, request: Request) -> None:
        """Queues a request. Raises like `engine.engine.Engine.submit`."""
        for each in self._upstreams.found:
            each.remote.protocol.check(request)
        self._intake.accept(request)
        self._post(lambda: self._requests.begin(request, self.failure))

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine: it serves nothing more."""
        return self._intake.failed

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT, index: int | None = None
    ) -> None:
        """End a request early, or one sequence of it; the last output says `reason`."""
        self._post(lambda: self._requests.abort(request_id, reason, index))

    def predicted_wait_s(self, share: str, num_tokens: int) -> float:
        """See `Intake.predicted_wait_s`."""
        return self._intake.predicted_wait_s(share, num_tokens)

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
        return self._intake.in_flight

    @property
    def kv_usage(self) -> float:
        """How much of the engines' own caches is in use, 0 to 1."""
        return self._upstreams.total("vllm:kv_cache_usage_perc") / len(self._upstreams.found)

    @property
    def num_blocks(self) -> int:
        """The size of the engines' own caches, as far as they say."""
        return sum(each.remote.num_blocks for each in self._upstreams.found)

    def stats(self) -> EngineStats:
        assert self._read_cache is not None, "`use` comes before"
        total, num_decoding = self._upstreams.total, self._requests.num_decoding
        return EngineStats(
            num_running=num_decoding,
            num_waiting=max(0, len(self._intake) - num_decoding),
            num_loading=0,
            num_preemptions=int(total("vllm:num_preemptions_total")),
            num_steps=int(total("vllm:iteration_tokens_total_count")),
            prompt_tokens_computed=self._requests.num_computed,
            jumped_tokens=0,
            cache=self._read_cache(),
            failed=repr(self.failure) if self.failure else None,
            engines=tuple(each.use() for each in self._upstreams.each),
        )

    def fail(self, error: BaseException) -> None:
        """The engine has ended for good: this server can serve no more requests."""
        if not self._intake.is_open:
            return
        self._intake.fail(error)
        logger.critical(f"the engine has failed: {error!r}")
        self._post(partial(self._requests.fail, f"the engine has failed: {error}"))

    def close(self, drain_s: float = 0.0) -> None:
        """Refuses new requests, lets running ones finish for `drain_s` seconds, and ends the
        rest."""
        self._intake.close()
        give_up = time.monotonic() + drain_s
        while self._intake and self._thread.is_alive() and time.monotonic() < give_up:
            time.sleep(0.01)
        if self._thread.is_alive():
            self._looking.cancel()
            ending = self._requests.close("the server is shutting down")
            asyncio.run_coroutine_threadsafe(ending, self._loop).result()
            asyncio.run_coroutine_threadsafe(self._upstreams.close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _post(self, command: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # closed: all requests in flight have ended
            self._loop.call_soon_threadsafe(command)

    # The engine's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _watch(self) -> None:
        await asyncio.gather(self._look(), self._upstreams.watch())

    async def _look(self) -> None:
        """Asks the engines whether they serve, reads their counters while they have work, and
        measures how fast work begins."""
        idle = False
        while True:
            was_idle, idle = idle, not self._intake
            await self._upstreams.probe(counting=not (idle and was_idle))
            await asyncio.sleep(LOOK_S)
            self._requests.look()
