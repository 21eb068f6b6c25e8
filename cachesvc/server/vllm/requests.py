"""Requests in vLLM: a task per sequence, from its prompt to its last output.

    begin ─► _serve, one task a sequence ─► AsyncLLM ─► Answer ─► on_outputs, once per turn

Called by `VllmEngine`, only on its thread's loop. Invariant: every request that begins gets one
`last` output.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachesvc.server.vllm.answer import RunningAnswer, finish_of, logprobs_of
from cachesvc.server.vllm.counts import EngineCounts
from cachesvc.vllm.reports import Reports, RequestReport
from engine.request import FinishReason, Request, StepOutput
from engine.scheduling.shares import ServedShares

logger = logging.getLogger(__name__)

REPORT_S = 2.0  # how long an aborted prompt waits for its progress report

# (AsyncLLM, request, sequence index, name in vLLM, priority) -> vLLM's outputs.
Generate = Callable[[Any, Request, int, str, int], AsyncIterator[Any]]


@dataclass(slots=True, eq=False)
class _Running:
    """A running request, with a task for each sequence that has begun."""

    answer: RunningAnswer
    tasks: dict[int, "asyncio.Task[None]"] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)  # sequences whose task has taken its first step
    ended: dict[int, FinishReason] = field(default_factory=dict)  # ended by us, with the reason
    is_arriving: bool = True  # its prompt has not begun
    error: str | None = None


class VllmRequests:
    """Owns the requests and their tasks.

    Shares are fair: vLLM's priority of a request is the number of tokens already served to its
    share, and the lowest goes first.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        llm: Any,
        generate: Generate,
        counts: EngineCounts,
        on_outputs: Callable[[Sequence[StepOutput]], None],
        *,
        reports: Reports | None,
        clock_ns: Callable[[], int],
        on_begun: Callable[[Request], None],
        on_over: Callable[[Request], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """`on_begun` is called when a prompt is complete or will never be, `on_death` when vLLM has
        died."""
        self._loop = loop
        self._llm = llm
        self._generate = generate
        self._counts = counts
        self._on_outputs = on_outputs
        self._reports = reports
        self._clock_ns = clock_ns
        self._on_begun = on_begun
        self._on_over = on_over
        self._on_death = on_death
        self._block_size: int = llm.vllm_config.cache_config.block_size
        self._running: dict[str, _Running] = {}
        self._outputs: list[StepOutput] = []
        self._shares = ServedShares()

    def begin(self, request: Request, failed: BaseException | None) -> None:
        """Starts a request; ends it with an error if the engine has `failed`."""
        answer = RunningAnswer(request, self._block_size, self._clock_ns())
        running = self._running[request.request_id] = _Running(answer)
        self._shares.enter(request.share)
        if failed is not None:  # accepted just before the engine failed
            self._end_with_error(running, f"the engine failed: {failed}")
            return
        self._spawn(running, 0)

    def fail(self, error: str) -> None:
        """Ends every running request with an error."""
        for running in list(self._running.values()):
            self._end_with_error(running, error)

    async def close(self, error: str) -> None:
        """Ends every running request and waits until all have ended."""
        for running in list(self._running.values()):
            running.error = error
            self.abort(running.answer.request.request_id, FinishReason.ABORT, None)
        tasks = [task for each in self._running.values() for task in each.tasks.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=REPORT_S + 1)
        self._flush()

    def _spawn(self, running: _Running, index: int) -> None:
        task = self._loop.create_task(self._serve(running, index))
        running.tasks[index] = task

    async def _serve(self, running: _Running, index: int) -> None:
        """Serves one sequence to its end."""
        running.begun.add(index)
        answer = running.answer
        request, name = answer.request, f"{answer.request.request_id}:{index}"
        if self._reports is not None:
            self._reports.expect(name)
        finish = FinishReason.ERROR
        error: str | None = "vLLM ended the request without saying why"
        try:
            priority = self._priority(request)
            async for output in self._generate(self._llm, request, index, name, priority):
                self._take_in(running, index, name, output)
        except asyncio.CancelledError:
            finish, error = running.ended.get(index, FinishReason.ABORT), running.error
            if not answer.is_admitted:
                answer.cut_short(await self._last_report(name))
        except Exception as fault:  # vLLM's errors have no common base class
            if self._llm.errored:
                self._on_death(fault)
            else:
                logger.exception(f"request {request.request_id} failed in vLLM")
            error = f"the engine failed in this request: {type(fault).__name__}; see the log"
        finally:
            if self._reports is not None:
                self._reports.forget(name)
        if index in answer.live:
            self._end(running, index, finish, error)

    def _priority(self, request: Request) -> int:
        """Tokens served to the request's share. vLLM takes the lowest first, if it has
        priorities."""
        priority = int(self._shares[request.share])
        self._shares.charge(request.share, len(request.tokens))
        return priority if self._llm.vllm_config.scheduler_config.policy == "priority" else 0

    def _take_in(self, running: _Running, index: int, name: str, output: Any) -> None:
        """Converts an output of vLLM."""
        answer, now_ns = running.answer, self._clock_ns()
        request = answer.request
        if not answer.is_admitted:
            if self._reports is not None:
                self._reports.take()
            report = self._reports.of(name) if self._reports is not None else None
            answer.admit(report, output.num_cached_tokens or 0, now_ns)
            self._admitted(running)
            self._counts.prompt_computed += answer.num_computed
        (made,) = output.outputs
        finish = finish_of(made.finish_reason)
        tokens = list(made.token_ids)
        params = request.params
        logprobs = logprobs_of(tokens, made.logprobs, params.logprobs)
        if params.max_tokens == 0:
            tokens, logprobs = [], []
        prompt_logprobs = []
        if output.prompt_logprobs is not None and index == 0 and params.prompt_logprobs is not None:
            logprobs = output.prompt_logprobs[1:]
            asked = request.tokens[1 : 1 + len(logprobs)]
            prompt_logprobs = logprobs_of(asked, logprobs, params.prompt_logprobs)
        if not (tokens or finish or prompt_logprobs):
            return
        self._shares.charge(request.share, len(tokens))
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
        """The prompt is complete. The other sequences begin now and hit it in the cache."""
        self._arrived(running)
        request = running.answer.request
        self._counts.begun(request.share, len(request.tokens))
        for index in running.answer.live:
            if index not in running.tasks:
                self._spawn(running, index)

    def _arrived(self, running: _Running) -> None:
        if running.is_arriving:
            running.is_arriving = False
            self._on_begun(running.answer.request)

    async def _last_report(self, name: str) -> RequestReport | None:
        """The connector's report on an aborted prompt, or None."""
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

    def abort(self, request_id: str, reason: FinishReason, index: int | None) -> None:
        """Ends a running request, or one of its sequences. Ignores unknown requests."""
        running = self._running.get(request_id)
        if running is None:
            return
        for each in [i for i in running.answer.live if index in (None, i)]:
            running.ended.setdefault(each, reason)
            if each in running.begun:
                running.tasks[each].cancel()
                continue
            if each in running.tasks:  # its coroutine will not run, so report its end here
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
        self._arrived(running)
        self._shares.leave(request.share)
        self._on_over(request)

    def _end_with_error(self, running: _Running, error: str) -> None:
        """Ends a failed request. The task that found the failure ends its own sequence."""
        running.error = error
        current = asyncio.current_task(self._loop)
        for index in running.answer.live:
            if running.tasks.get(index) is not current or current is None:
                self.abort(running.answer.request.request_id, FinishReason.ERROR, index)

    def _tell(self, output: StepOutput) -> None:
        """Queues an output. Outputs of one turn of the loop are sent together."""
        if not self._outputs:
            self._loop.call_soon(self._flush)
        self._outputs.append(output)

    def _flush(self) -> None:
        """Sends the queued outputs."""
        outputs, self._outputs = self._outputs, []
        if outputs:
            self._on_outputs(outputs)
