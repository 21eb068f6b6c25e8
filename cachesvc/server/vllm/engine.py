"""The engine's face over vLLM's `AsyncLLM`: one thread with an event loop that owns it.

    submit ─► _serve, one task a sequence ─► AsyncLLM ─► Answer ─► on_outputs, once per turn

vLLM's engine core and workers are processes. When they die the engine has failed: whatever is in
flight ends in an error, and the server ends so that a supervisor starts it again. A tenant that
asks for much waits behind one that asks for little: vLLM's priorities are the tokens that a share
was served.
"""

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cachesvc.server.vllm.adapters import VllmAdapter
from cachesvc.server.vllm.answer import Answer, finish_of, logprobs_of
from cachesvc.server.vllm.counts import Counts
from cachesvc.server.vllm.grammars import structure_in
from cachesvc.server.vllm.params import check_served, sampling_of
from cachesvc.vllm.identity import salt_of
from cachesvc.vllm.reports import Report, Reports
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
from engine.request import FinishReason, Request, SamplingParams, StepOutput
from engine.scheduling.shares import Backlog, ServedShares
from tiers.cache import CacheStats, TieredCache

logger = logging.getLogger(__name__)

HEALTH_S = 0.5  # how often vLLM is asked whether it lives
REPORT_S = 2.0  # how long the end of an aborted prompt waits to hear how far it came
SHUTDOWN_S = 30.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Bounds, and what the engine must know of the model."""

    max_waiting: int
    eos_token_ids: frozenset[int]
    check_params: Callable[[SamplingParams], None]
    adapters: Mapping[str, VllmAdapter]


@dataclass(slots=True, eq=False)
class _Running:
    """A request on its way, with a task for each sequence that has begun."""

    answer: Answer
    tasks: dict[int, "asyncio.Task[None]"] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)  # whose task has taken its first step
    ended: dict[int, FinishReason] = field(default_factory=dict)  # by us, and why
    is_arriving: bool = True  # its prompt has not begun
    error: str | None = None


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
    ) -> None:
        """`open_llm` makes the AsyncLLM, on the engine's loop, with a factory of stat loggers.
        `reports` are the connector's; None where vLLM runs without it."""
        self._open_llm = open_llm
        self._settings = settings
        self._on_outputs = on_outputs
        self._reports = reports
        self._clock_ns = clock_ns
        self._llm: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="cachesvc-engine", daemon=True)
        self._lock = threading.Lock()
        self._submitted: set[str] = set()  # requests in flight; guarded by the lock
        self._arriving: Counter[str] = Counter()  # prompt tokens not begun, by share; by the lock
        self._running: dict[str, _Running] = {}
        self._outputs: list[StepOutput] = []
        self._shares = ServedShares()
        self._closing = False
        self._failed: BaseException | None = None
        self.counts = Counts(self._look_at_backlog)
        self._cache: TieredCache | None = None
        self._read_cache: Callable[[], CacheStats] | None = None
        self.block_size = 0
        self.max_tokens = 0
        self.vllm_config: Any = None

    # Any thread.

    def open(self) -> None:
        """Start vLLM and wait until it has loaded the model. Raises ModelError with its reason."""
        opened: Future[None] = Future()
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(opened), self._loop)
        opened.result()

    def use(self, cache: TieredCache, stats: Callable[[], CacheStats]) -> None:
        """What `call` works on, and what `stats` says of the tiers."""
        self._cache, self._read_cache = cache, stats

    def submit(self, request: Request) -> None:
        """Queue a request; raises as `engine.engine.Engine.submit`."""
        self._check(request)
        with self._lock:
            if self._failed is not None:
                raise EngineFailed(f"the engine has failed: {self._failed}") from self._failed
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
        self._post(lambda: self._begin(request))

    def abort(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.ABORT,
        index: int | None = None,
    ) -> None:
        """End a request early, or one sequence of it; the last output says `reason`."""
        self._post(lambda: self._abort(request_id, reason, index))

    def predicted_wait_s(self, share: str, num_tokens: int) -> float:
        """How long a prompt of `share` would wait to begin, at the rate of late."""
        with self._lock:
            waiting = Counter(self._arriving)
        return Backlog(waiting, self.counts.begin_rate.tokens_per_s).wait_s(share, num_tokens)

    def call(self, function: Callable[[TieredCache], T]) -> "Future[T]":
        """Run `function` on the engine's thread, on what stands for the tiers here."""
        future: Future[T] = Future()
        if self._failed is not None:
            future.set_exception(EngineFailed(f"the engine has failed: {self._failed}"))
            return future

        def run() -> None:
            assert self._cache is not None, "`use` comes before"
            try:
                future.set_result(function(self._cache))
            except Exception as error:  # noqa: BLE001 - handed to who asked
                future.set_exception(error)

        self._post(run)
        return future

    def in_flight(self) -> frozenset[str]:
        """The requests that were submitted and have not ended."""
        with self._lock:
            return frozenset(self._submitted)

    def forget_prefixes(self) -> "Future[bool]":
        """Let vLLM empty its own prefix cache; running requests compute theirs again."""
        forgetting: Future[bool] = asyncio.run_coroutine_threadsafe(
            self._llm.reset_prefix_cache(reset_running_requests=True), self._loop
        )
        return forgetting

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine, if something did. It serves nothing from then on."""
        return self._failed

    def stats(self) -> EngineStats:
        assert self._read_cache is not None, "`use` comes before"
        failed = repr(self._failed) if self._failed else None
        return self.counts.stats(self._read_cache(), failed)

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for `drain_s` seconds, end vLLM."""
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
        with contextlib.suppress(RuntimeError):  # closed: everything in flight has ended
            self._loop.call_soon_threadsafe(command)

    # The engine's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        # Ctrl-C reaches every process of the terminal; vLLM's are to end when we say so.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._loop.run_forever()

    async def _open(self, opened: "Future[None]") -> None:
        try:
            self._llm = self._open_llm(lambda config, index=0: self.counts.logger(config, index))
            self.vllm_config = self._llm.vllm_config
            self.max_tokens = self.vllm_config.model_config.max_model_len
            self.block_size = self.vllm_config.cache_config.block_size
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
        for running in list(self._running.values()):
            running.error = "the server is shutting down"
            self._abort(running.answer.request.request_id, FinishReason.ABORT, None)
        tasks = [task for each in self._running.values() for task in each.tasks.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=REPORT_S + 1)
        self._flush()
        if self._llm is not None:
            self._health.cancel()
            if self._reports is not None:
                self._loop.remove_reader(self._reports.socket)
            await asyncio.to_thread(self._llm.shutdown, SHUTDOWN_S)

    def _begin(self, request: Request) -> None:
        answer = Answer(request, self.block_size, self._clock_ns())
        running = self._running[request.request_id] = _Running(answer)
        self._shares.enter(request.share)
        if self._failed is not None:  # accepted just before the engine failed
            self._end_with_error(running, f"the engine failed: {self._failed}")
            return
        self._spawn(running, 0)

    def _spawn(self, running: _Running, index: int) -> None:
        task = self._loop.create_task(self._serve(running, index))
        running.tasks[index] = task

    async def _serve(self, running: _Running, index: int) -> None:
        """One sequence, to its end."""
        running.begun.add(index)
        answer = running.answer
        request, name = answer.request, f"{answer.request.request_id}:{index}"
        if self._reports is not None:
            self._reports.expect(name)
        finish = FinishReason.ERROR
        error: str | None = "vLLM ended the request without saying why"
        try:
            async for output in self._generated(request, index, name):
                self._take_in(running, index, name, output)
        except asyncio.CancelledError:
            finish, error = running.ended.get(index, FinishReason.ABORT), running.error
            if not answer.is_admitted:
                answer.cut_short(await self._last_report(name))
        except Exception as fault:  # vLLM's errors have no common root
            if self._llm.errored:
                self._fail(fault)
            else:
                logger.exception(f"request {request.request_id} failed in vLLM")
            error = f"the engine failed in this request: {type(fault).__name__}; see the log"
        finally:
            if self._reports is not None:
                self._reports.forget(name)
        if index in answer.live:
            self._end(running, index, finish, error)

    def _generated(self, request: Request, index: int, name: str) -> Any:
        from vllm.inputs.engine import tokens_input
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind
        from vllm.sampling_params import SamplingParams as Sampling

        room = self.max_tokens - len(request.tokens)
        fields = sampling_of(
            request, index, end=self._settings.eos_token_ids, name=name, max_tokens=room
        )
        sampling = Sampling(
            **fields,
            structured_outputs=structure_in(request.grammar),
            output_kind=RequestOutputKind.DELTA,
        )
        lora = None
        if request.adapter is not None:
            adapter = self._settings.adapters[request.adapter]
            lora = LoRARequest(request.adapter, adapter.number, adapter.folder)
        # What is not to be cached stands under a salt that nobody else has.
        tenant = request.scope.tenant if request.cache else name.encode()
        prompt = tokens_input(list(request.tokens), cache_salt=salt_of(tenant) if tenant else None)
        priority = self._priority(request) if self._has_priorities else 0
        return self._llm.generate(
            prompt, sampling, request_id=name, lora_request=lora, priority=priority
        )

    @property
    def _has_priorities(self) -> bool:
        return bool(self.vllm_config.scheduler_config.policy == "priority")

    def _priority(self, request: Request) -> int:
        """What its share has been served: vLLM takes the least first."""
        priority = int(self._shares[request.share])
        self._shares.charge(request.share, len(request.tokens))
        return priority

    def _take_in(self, running: _Running, index: int, name: str, output: Any) -> None:
        """An output of vLLM's becomes ours."""
        answer, now_ns = running.answer, self._clock_ns()
        request = answer.request
        if not answer.is_admitted:
            if self._reports is not None:
                self._reports.take()
            report = self._reports.of(name) if self._reports is not None else None
            answer.admit(report, output.num_cached_tokens or 0, now_ns)
            self._admitted(running)
            self.counts.prompt_computed += answer.num_computed
        (made,) = output.outputs
        finish = finish_of(made.finish_reason)
        tokens = list(made.token_ids)
        params = request.params
        logprobs = logprobs_of(tokens, made.logprobs, params.logprobs)
        if params.max_tokens == 0:
            tokens, logprobs = [], []
        prompt_logprobs = []
        if output.prompt_logprobs is not None and index == 0 and params.prompt_logprobs is not None:
            told = output.prompt_logprobs[1:]
            asked = request.tokens[1 : 1 + len(told)]
            prompt_logprobs = logprobs_of(asked, told, params.prompt_logprobs)
        if not (tokens or finish or prompt_logprobs):
            return
        self._shares.charge(request.share, len(tokens))
        self.counts.generated += len(tokens)
        error = None
        if finish is FinishReason.ERROR:
            error = f"vLLM ended the request: {made.finish_reason}"
        self._tell(
            answer.output(
                index,
                now_ns,
                tokens=tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                finish=finish,
                error=error,
            )
        )
        if finish is not None:
            self._close_if_over(running)

    def _admitted(self, running: _Running) -> None:
        """The prompt stands: the other sequences find it in the cache, and begin now."""
        self._no_longer_arriving(running)
        self.counts.begun(len(running.answer.request.tokens))
        for index in running.answer.live:
            if index not in running.tasks:
                self._spawn(running, index)

    def _no_longer_arriving(self, running: _Running) -> None:
        if not running.is_arriving:
            return
        running.is_arriving, request = False, running.answer.request
        with self._lock:
            self._arriving[request.share] -= len(request.tokens)
            if not self._arriving[request.share]:
                del self._arriving[request.share]

    async def _last_report(self, name: str) -> Report | None:
        """What the connector says of a prompt that was ended; None where it says nothing."""
        if self._reports is None:
            return None
        give_up = time.monotonic() + REPORT_S
        while True:
            self._reports.take()
            report = self._reports.of(name)
            if report is not None and report.computed is not None:
                return report
            if time.monotonic() > give_up or self._llm.errored:
                return report
            await asyncio.sleep(0.01)

    def _abort(self, request_id: str, reason: FinishReason, index: int | None) -> None:
        running = self._running.get(request_id)
        if running is None:
            return
        for each in [i for i in running.answer.live if index in (None, i)]:
            running.ended.setdefault(each, reason)
            if each in running.begun:
                running.tasks[each].cancel()
                continue
            if each in running.tasks:  # its coroutine will not run: nobody else tells of it
                running.tasks[each].cancel()
            if len(running.answer.live) > 1:
                running.answer.end(each)
            else:
                self._end(running, each, reason, running.error)

    def _end(
        self, running: _Running, index: int, finish: FinishReason, error: str | None = None
    ) -> None:
        if not running.answer.is_admitted:
            running.answer.cut_short(None)
        if finish in (FinishReason.ABORT, FinishReason.ERROR):
            for each in running.answer.live:
                if each != index and each not in running.tasks:
                    running.answer.end(each)
        self._tell(running.answer.output(index, self._clock_ns(), finish=finish, error=error))
        self._close_if_over(running)

    def _close_if_over(self, running: _Running) -> None:
        request = running.answer.request
        if not running.answer.over or request.request_id not in self._running:
            return
        del self._running[request.request_id]
        self._no_longer_arriving(running)
        self._shares.leave(request.share)
        with self._lock:
            self._submitted.discard(request.request_id)

    def _end_with_error(self, running: _Running, error: str) -> None:
        """End a request that cannot go on; the task that found it out ends its own sequence."""
        running.error = error
        current = asyncio.current_task(self._loop)
        for index in running.answer.live:
            if running.tasks.get(index) is not current or current is None:
                self._abort(running.answer.request.request_id, FinishReason.ERROR, index)

    def _fail(self, error: BaseException) -> None:
        """vLLM is dead: nothing is served from now on."""
        if self._failed is not None or self._closing:
            return
        logger.critical(f"the engine has failed: {error!r}")
        with self._lock:
            self._failed = error
        for running in list(self._running.values()):
            self._end_with_error(running, f"the engine has failed: {error}")

    def _tell(self, output: StepOutput) -> None:
        """Outputs of one turn of the loop go out together."""
        if not self._outputs:
            self._loop.call_soon(self._flush)
        self._outputs.append(output)

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        if outputs:
            self._on_outputs(outputs)

    def _look_at_backlog(self) -> None:
        """Once per step of vLLM's."""
        with self._lock:
            waits = bool(self._arriving)
        self.counts.begin_rate.look(self._clock_ns(), waits=waits)
