"""Requests in an engine elsewhere: a task per sequence, from its prompt to its last output.

    begin ─► _serve, one task a sequence ─► Protocol over HTTP ─► RunningAnswer ─► on_outputs

Called by `RemoteEngine`, only on its thread's loop. Invariant: every request that begins gets one
`last` output. Outputs of one turn of the loop are sent together.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from typing import Protocol as TypingProtocol

from engine.errors import RemoteAway, RemoteFault
from engine.intake import Intake
from engine.remote.answer import Report, RunningAnswer
from engine.remote.client import ENDED_IN_ERROR, UNREADABLE
from engine.remote.protocol import Protocol, SequenceAsk, Told, cached_of
from engine.remote.upstreams import Upstream, Upstreams
from engine.request import FinishReason, Request, StepOutput
from engine.scheduling.shares import BeginRate, ServedShares

logger = logging.getLogger(__name__)

REPORT_S = 2.0  # how long an aborted prompt waits for its progress report


class PromptReports(TypingProtocol):
    """What a connector beside the engine's scheduler says, by the names that we gave."""

    def expect(self, name: str) -> None: ...
    def take(self) -> None: ...
    def of(self, name: str) -> Report | None: ...
    def forget(self, name: str) -> None: ...


@dataclass(slots=True, eq=False)
class _Running:
    """A running request, with a task for each sequence that has begun."""

    answer: RunningAnswer
    upstream: Upstream | None = None  # that answers it
    tasks: dict[int, "asyncio.Task[None]"] = field(default_factory=dict)
    ended: dict[int, FinishReason] = field(default_factory=dict)  # ended by us, with the reason
    done: set[int] = field(default_factory=set)  # the engine has said how they end
    is_sent: bool = False  # the engine has all of its prompt
    error: str | None = None

    def sent(self) -> None:
        self.is_sent = True


class RemoteRequests:
    """Owns the requests and their tasks.

    Shares are fair: a request's priority is the number of tokens already served to its share, and
    the lowest goes first.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        upstreams: Upstreams,
        intake: Intake,
        on_outputs: Callable[[Sequence[StepOutput]], None],
        *,
        end: frozenset[int],
        reports: PromptReports | None,
        clock_ns: Callable[[], int],
    ) -> None:
        """`end` are the model's end-of-answer ids."""
        self.num_computed = 0  # prompt tokens
        self._loop = loop
        self._upstreams = upstreams
        self._intake = intake
        self._on_outputs = on_outputs
        self._reports = reports
        self._end_ids = end
        self._clock_ns = clock_ns
        self._running: dict[str, _Running] = {}
        self._outputs: list[StepOutput] = []
        self._shares = ServedShares()
        self._rate = BeginRate()

    @property
    def num_decoding(self) -> int:
        """Sequences whose prompt is complete."""
        begun = (each.answer for each in self._running.values() if each.answer.has_begun)
        return sum(len(answer.live) for answer in begun)

    def begin(self, request: Request, failed: BaseException | None) -> None:
        """Starts a request; ends it with an error if the engine has `failed`."""
        block_size = self._upstreams.found[0].remote.block_size
        answer = RunningAnswer(request, block_size, self._clock_ns())
        running = self._running[request.request_id] = _Running(answer)
        self._shares.enter(request.share)
        if failed is not None:  # accepted just before the engine failed
            self._tell(running, 0, Told(finish=FinishReason.ERROR), f"the engine failed: {failed}")
            return
        self._spawn(running, 0)

    def look(self) -> None:
        """Measures how fast work begins, and reads what the connector sent: what nobody reads fills
        its socket."""
        self._measure()
        if self._reports is not None:
            self._reports.take()

    def _measure(self) -> None:
        backlog = self._rate.look(self._clock_ns(), self._intake.arriving)
        self._intake.backlog = backlog._replace(waiting={})  # the intake counts what arrives

    def fail(self, error: str) -> None:
        """Ends every running request with an error."""
        for running in list(self._running.values()):
            self._end_all(running, FinishReason.ERROR, error)

    async def close(self, error: str) -> None:
        """Ends every running request and waits until all have ended."""
        tasks = [task for each in self._running.values() for task in each.tasks.values()]
        for running in list(self._running.values()):
            self._end_all(running, FinishReason.ABORT, error)
        if tasks:
            await asyncio.wait(tasks, timeout=REPORT_S + 1)
        self._flush()

    def abort(self, request_id: str, reason: FinishReason, index: int | None) -> None:
        """Ends a running request, or one of its sequences. Ignores unknown requests, and sequences
        that end already."""
        running = self._running.get(request_id)
        if running is None:
            return
        for each in [i for i in running.answer.live if index in (None, i)]:
            if each in running.done and reason is FinishReason.STOP:
                continue  # its usage is on the way
            running.ended.setdefault(each, reason)
            if each in running.tasks:
                running.tasks[each].cancel()
            else:  # it waits for the first one
                running.answer.end(each)

    def _end_all(self, running: _Running, reason: FinishReason, error: str) -> None:
        running.error = error
        self.abort(running.answer.request.request_id, reason, None)

    def _spawn(self, running: _Running, index: int) -> None:
        task = self._loop.create_task(self._serve(running, index))
        running.tasks[index] = task
        task.add_done_callback(partial(self._served, running, index))

    async def _serve(self, running: _Running, index: int) -> None:
        """Serves one sequence to its end."""
        name = f"{running.answer.request.request_id}:{index}"
        if self._reports is not None:
            self._reports.expect(name)
        try:
            await self._try(running, index)
        except asyncio.CancelledError:
            if not running.answer.has_begun:
                silent = self._reports is None and running.is_sent
                running.answer.cut_short(await self._last_report(name), unreported=silent)
            raise
        finally:
            if self._reports is not None:
                self._reports.forget(name)

    async def _try(self, running: _Running, index: int) -> None:
        """Asks the engine that has the request, or one for it. If that fails before the answer
        begins, one other is asked. Raises RemoteFault."""
        request = running.answer.request
        priority = int(self._shares[request.share])
        self._shares.charge(request.share, len(request.tokens))
        upstream = running.upstream or self._upstreams.pick(request=request)
        if upstream is None:
            raise RemoteAway("No engine of this model answers now; try again later.")
        try:
            await self._pass_on(running, self._ask(request, index, upstream, priority), upstream)
        except RemoteFault:
            other = None if running.answer.has_begun else self._upstreams.pick(upstream, request)
            if other is None:
                raise
            await self._pass_on(running, self._ask(request, index, other, priority), other)

    def _served(self, running: _Running, index: int, task: "asyncio.Task[None]") -> None:
        """The task of a sequence is over. Tells its end, unless the engine's was told."""
        fault = None if task.cancelled() else task.exception()
        if index not in running.answer.live:
            return
        if task.cancelled():
            finish = running.ended.get(index, FinishReason.ABORT)
            self._tell(running, index, Told(finish=finish), running.error)
            return
        if fault is not None and not isinstance(fault, RemoteFault):
            logger.error("a request to the engine failed", exc_info=fault)
            fault = RemoteFault(UNREADABLE)
        fault = fault or RemoteFault("The engine ended the request without saying why.")
        self._tell(running, index, Told(finish=FinishReason.ERROR), running.error or fault)

    def _ask(self, request: Request, index: int, upstream: Upstream, priority: int) -> SequenceAsk:
        remote = upstream.remote
        # A request that must not be cached gets a salt of its own.
        tenant = request.scope.tenant if request.cache else os.urandom(16)
        return SequenceAsk(
            request=request,
            index=index,
            name=f"{request.request_id}:{index}",
            model=request.adapter or remote.model,
            end=self._end_ids,
            room=remote.max_tokens - len(request.tokens),
            priority=priority,
            salt=salt_of(tenant) if tenant else None,
        )

    async def _pass_on(self, running: _Running, ask: SequenceAsk, upstream: Upstream) -> None:
        """Passes on what an engine says. Its end waits for the usage that comes after it."""
        protocol, num_tokens, usage = upstream.remote.protocol, 0, None
        held: Told | None = None
        running.is_sent = False
        asked = upstream.http.events(protocol.path, protocol.body(ask), running.sent)
        with upstream.serving():
            async with aclosing(asked) as events:
                async for event in events:
                    told = _read(protocol, event, ask, num_tokens)
                    num_tokens += len(told.tokens)
                    usage = told.usage or usage
                    if not running.answer.has_begun:
                        upstream.answered()
                        running.upstream = upstream
                        self._begin(running, ask)
                    if told.finish is None or told.by_string:
                        self._tell(running, ask.index, told._replace(finish=None))
                        told = told._replace(tokens=(), logprobs=(), prompt_logprobs=())
                    if told.finish is not None:
                        held = told
                        running.done.add(ask.index)
        if ask.index == 0:
            running.answer.count(cached_of(usage, len(ask.request.tokens)))
        if held is not None:
            self._tell(running, ask.index, held)

    def _begin(self, running: _Running, ask: SequenceAsk) -> None:
        """The prompt is complete. The other sequences begin now and hit it in the cache."""
        report = None
        if self._reports is not None:
            self._reports.take()
            report = self._reports.of(ask.name)
        running.answer.begin(report, self._clock_ns())
        request = running.answer.request
        self._intake.queued(request)
        self._rate.begun(request.share, len(request.tokens))
        self._measure()
        for index in running.answer.live:
            if index not in running.tasks:
                self._spawn(running, index)

    def _tell(
        self, running: _Running, index: int, told: Told, error: str | RemoteFault | None = None
    ) -> None:
        """Queues what was told, if it is anything."""
        answer, request = running.answer, running.answer.request
        if request.params.max_tokens == 0:  # one was generated, as it must
            told = told._replace(tokens=(), logprobs=())
        if not (told.tokens or told.finish or told.prompt_logprobs):
            return
        self._shares.charge(request.share, len(told.tokens))
        if told.finish in (FinishReason.ABORT, FinishReason.ERROR):
            for each in answer.live:
                if each != index and each not in running.tasks:
                    answer.end(each)
        if told.finish is FinishReason.ERROR:
            error = error or RemoteFault(ENDED_IN_ERROR)
        if not self._outputs:
            self._loop.call_soon(self._flush)
        self._outputs.append(answer.output(index, self._clock_ns(), told, error))
        if told.finish is not None:
            self._close_if_over(running)

    async def _last_report(self, name: str) -> Report | None:
        """The connector's report on an aborted prompt, or None."""
        if self._reports is None:
            return None
        give_up = time.monotonic() + REPORT_S
        while True:
            self._reports.take()
            report = self._reports.of(name)
            if (report is not None and report.computed is not None) or time.monotonic() > give_up:
                return report
            await asyncio.sleep(0.01)

    def _close_if_over(self, running: _Running) -> None:
        request = running.answer.request
        if not running.answer.over or request.request_id not in self._running:
            return
        del self._running[request.request_id]
        if not running.answer.has_begun:  # and never will
            self._intake.queued(request)
        self._shares.leave(request.share)
        if running.upstream is not None:
            running.upstream.served(running.answer.counts)
        self.num_computed += running.answer.counts.miss
        self._intake.ended(request.request_id)

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        if outputs:
            self._on_outputs(outputs)


def _read(protocol: Protocol, event: Mapping[str, Any], ask: SequenceAsk, num_tokens: int) -> Told:
    """What an event tells. Raises RemoteFault for one that is not understood."""
    try:
        told = protocol.told(event, ask, num_tokens)
        if not all(type(each) is int and each >= 0 for each in told.tokens):
            raise ValueError("a token has no id")
        return told
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("an answer of the engine cannot be read", exc_info=error)
        raise RemoteFault(UNREADABLE) from None


def salt_of(tenant: bytes) -> str:
    """The engine's salt for a tenant's; our connector turns it back."""
    return f"hex:{tenant.hex()}"
