"""One request's passage through an endpoint: its bytes as they come, its usage in our classes.

Takes the place of a `Generation`: see `api.requests.delivery.Producer`. The bytes of a stream go on
event by event. Text is covered before it is sent: a token has a byte at least, so as many tokens
as the text has bytes are held. What the endpoint itself counted is charged. Event loop only.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Final

from api.job import Delta, Job, Served
from api.relay.body import Ascent
from api.relay.protocol import ANSWERS, answer_bytes, is_cut, is_error, note_of
from api.relay.refusal import refusal_of
from api.relay.usage import CACHED_HEADER, UsageReader, billed
from api.requests.delivery import UNCOUNTED
from api.requests.metering import LedgerCharge
from billing.gate.outcomes import Outcome
from billing.usage import EMPTY, HIT_CLASSES, Usage
from engine.errors import RemoteAway, RemoteFault
from engine.remote.client import (
    BROKE_OFF,
    ENDED_IN_ERROR,
    OF_THE_BODY,
    TOO_LONG,
    UNREADABLE,
    EngineCall,
    HttpAnswer,
)
from engine.remote.upstreams import Upstream
from engine.request import BlockRun, FinishReason, Lookup, StepOutput, Timeline, TokenCounts
from tiers.errors import MissReason

MAX_EVENT_BYTES: Final = 4 << 20  # of one event, and of those that wait for the settlement
MAX_ANSWER_BYTES: Final = 64 << 20  # of an answer that comes whole
DONE: Final = b"[DONE]"
NO_ID: Final = -1  # of a token that only its endpoint knows
_EVENT_END = re.compile(rb"\r?\n\r?\n|\r\r")
_FINISHES = {
    Outcome.FINISHED: FinishReason.STOP,
    Outcome.BUDGET: FinishReason.LENGTH,
    Outcome.CLIENT_GONE: FinishReason.ABORT,
}


class Passage:
    """Invariant: the request at the endpoint has ended when `deltas` ends, whyever it does."""

    def __init__(self, job: Job, ascent: Ascent, *, wants_usage: bool, charge: LedgerCharge):
        self.job = job
        self._ascent = ascent
        self._wants_usage = wants_usage
        self._charge = charge
        self._reader = UsageReader(is_partial=ascent.protocol.is_messages)
        self._reading: asyncio.Future[list[bytes] | None] | None = None
        self._site: Upstream | None = None
        self._asked = EngineCall("")
        self._outcome = Outcome.FINISHED
        self._error: str | None = None
        self._is_over = False  # nothing more is read
        self._is_asked = False  # the endpoint has all of the body, and did not refuse it
        self._has_begun = False  # a part of the answer came
        self._is_ending = False  # the events of its end came
        self.answered = False  # and no other is to be sent
        self._is_complete = False  # its last event came, or all of it
        self._finished: set[str] = set()
        self._is_cut = False  # at its limit
        self._most_prompt = job.prompt_most
        self._num_sent = 0  # tokens at least
        self._most_sent = 0  # tokens at most
        self._end_bytes = 0
        self._covered = job.max_output
        self._when = Timeline(arrival_ns=job.arrival_ns)
        self._is_told = False

    def submit(self) -> None:
        now = time.monotonic_ns()
        self._when = self._when._replace(admitted_ns=now, loaded_ns=now)
        self._ascent.endpoint.began()

    def close(self) -> None:
        """Ends what is left, and tells who watches the endpoint."""
        self._stop()
        if not self._is_told:
            self._is_told = True
            output = self._output()
            if self._site is not None:
                self._site.served(output.counts)
            self._ascent.endpoint.ended(output)

    def cancel(self) -> None:
        if self._outcome is Outcome.FINISHED and not self._is_over:
            self._outcome = Outcome.CLIENT_GONE
            self._stop()

    def fail(self, reason: str) -> None:
        if self._outcome is Outcome.FINISHED:
            self._outcome, self._error = Outcome.FAILED, reason
        self._stop()

    def usage(self) -> Usage:
        left = self._is_asked and self._outcome is Outcome.CLIENT_GONE
        if not (self._has_begun or left):
            return EMPTY
        most = {"most_prompt": self._most_prompt, "most_output": self._covered}
        sent, is_whole = self._num_sent, self._is_ending
        return billed(self._reader.counted, sent=sent, is_whole=is_whole, **most)

    def served(self) -> Served:
        usage = self.usage()
        stop = MissReason.UNREPORTED if usage.unreported else MissReason.ABSENT
        computed = BlockRun(None, usage.hit, usage.miss, 1)
        return Served(
            self._outcome,
            usage,
            {stop: usage.miss} if usage.miss else {},
            self._when,
            self._error,
            refusal=self._charge.refusal if self._outcome is Outcome.BUDGET else None,
            lookups=(Lookup((computed,), stop, 1),) if usage.unreported else (),
            finishes=(self._finish,) if self._is_over else (),
        )

    @property
    def _finish(self) -> FinishReason:
        if self._is_cut and self._outcome is Outcome.FINISHED:
            return FinishReason.LENGTH
        return _FINISHES.get(self._outcome, FinishReason.ERROR)

    async def deltas(self, idle_s: float | None = None) -> AsyncIterator[list[Delta]]:
        """Raises ApiError if the endpoint refuses the body, RemoteFault if it fails, and GateError
        if the rest of the answer is not paid for."""
        events = self._events()
        try:
            while not self._is_over:
                self._reading = asyncio.ensure_future(anext(events, None))
                while not (await asyncio.wait({self._reading}, timeout=idle_s))[0]:
                    # A long silence: renew the hold.
                    await self._cover(min(self._most_sent, self.job.max_output))
                    yield []
                if self._reading.cancelled() or (batch := self._reading.result()) is None:
                    break
                async for deltas in self._take(batch):
                    yield deltas
            if self._outcome is Outcome.FINISHED:
                await self._end()
            elif self._outcome is Outcome.BUDGET and self._charge.refusal is not None:
                raise self._charge.refusal
        finally:
            self._is_over = True
            if self._reading is not None and not self._reading.done():
                self._reading.cancel()
                await asyncio.wait({self._reading})
            await events.aclose()

    async def _events(self) -> AsyncGenerator[list[bytes]]:
        """The events of the answer as they come, or its body."""
        sites, failed = self._ascent.endpoint.sites, None
        told: RemoteFault = RemoteAway("No engine of the model answers.")
        while (site := sites.pick(but=failed)) is not None:
            try:
                async for events in self._events_of(site):
                    yield events
                return
            except RemoteFault as fault:
                if self._has_begun or failed is not None:
                    raise
                failed, told = site, fault  # before the first byte another is tried, once
        raise told

    async def _events_of(self, site: Upstream) -> AsyncGenerator[list[bytes]]:
        self._site, self._is_asked = site, False
        up, path = self._ascent, self._ascent.protocol.path
        data, headers = up.encoded(self._charge.service_tier), up.all_headers()
        with site.serving():
            async with site.http.request("POST", path, data, headers, self._sent_up) as answer:
                self._asked = answer.asked
                if answer.status != 200:
                    self._is_asked = False
                    if answer.status in OF_THE_BODY:  # that is no fault of its own
                        site.answered()
                    raise refusal_of(answer, await answer.beginning())
                self._reader.cached = answer.headers.get(CACHED_HEADER, "")
                if answer.is_stream != self.job.stream:
                    raise answer.asked.fault(f"a stream: {not self.job.stream}", UNREADABLE)
                try:
                    async for events in self._parts(answer):
                        yield events
                finally:
                    answer.has_all = self._is_complete

    def _sent_up(self) -> None:
        self._is_asked = True

    async def _parts(self, answer: HttpAnswer) -> AsyncGenerator[list[bytes]]:
        if not self.job.stream:
            yield [await answer.whole(MAX_ANSWER_BYTES)]
            return
        rest = b""
        try:
            while chunk := await answer.read():
                *events, rest = _split(rest + chunk)
                if len(rest) > MAX_EVENT_BYTES:
                    raise answer.asked.fault("an event is too long", TOO_LONG)
                if events:
                    yield events
        except RemoteFault:
            if not self._is_known:
                raise
        if rest.strip() and (DONE in rest or not self._is_known):
            yield [rest]

    @property
    def _is_known(self) -> bool:
        """The answer and what it cost: what may come now is dispensable."""
        return self._is_ending and bool(self._reader.counted.prompt)

    async def _take(self, batch: Sequence[bytes]) -> AsyncIterator[list[Delta]]:
        """Reads what came and covers it. The answer ends before the first event that is not
        covered. What comes before its end does not wait for it."""
        passing = list[bytes]()
        for part in batch:
            num_sent = self._num_sent
            passes = self._passes(part)
            if self._is_ending and not self.answered:
                if passing and self.job.stream:
                    yield [Delta(0, "", raw=b"".join(passing))]
                    passing = []
                self.answered = True
            most = min(self._most_sent, self.job.max_output)
            if await self._cover(most) < most:
                self._num_sent, self._outcome, self._is_over = num_sent, Outcome.BUDGET, True
            elif passes:
                passing.append(part)
                self._end_bytes += len(part) if self._is_ending and self.job.stream else 0
            if self._is_over:
                break
        now = time.monotonic_ns()
        first_ns = self._when.first_token_ns or (now if self._num_sent else 0)
        self._when = self._when._replace(first_token_ns=first_ns, last_token_ns=now)
        if self._end_bytes > MAX_EVENT_BYTES:
            raise self._asked.fault("its end is too long", TOO_LONG)
        if passing:
            yield [Delta(0, "", raw=b"".join(passing))]

    def _passes(self, part: bytes) -> bool:
        """Takes in an event or the body. Returns whether the client gets it."""
        if not self.job.stream:
            self._take_body(part)
            return True
        data = b"\n".join(one[5:].strip() for one in part.splitlines() if one.startswith(b"data:"))
        if not data:
            return True  # a comment
        self._has_begun = True
        if data == DONE:
            if not (self._num_sent or self._finished or self._reader.counted.prompt):
                raise self._asked.fault("it ends before it begins", UNREADABLE)
            self._is_ending = self._is_complete = self._is_over = True
            return True
        document = self._asked.event(data)
        told, note = self._reader.read(document), note_of(document)
        self._is_cut |= is_cut(document)
        if note.is_error:
            raise self._asked.fault("an error in its answer", ENDED_IN_ERROR)
        self._num_sent += note.num_texts
        self._most_sent += note.num_bytes
        self._finished |= note.finished
        is_bare = told and note.is_bare_usage
        all_finished = len(self._finished) >= self.job.num_choices
        is_last_usage = is_bare and not document.get("choices")
        self._is_ending |= note.is_ending or is_last_usage or all_finished
        self._is_complete |= note.is_last
        self._is_over |= note.is_last
        return self._wants_usage or not is_bare

    def _take_body(self, data: bytes) -> None:
        document = self._asked.event(data)
        if is_error(document) or document.keys().isdisjoint(ANSWERS):
            raise self._asked.fault("no answer", UNREADABLE)
        self._reader.read(document)
        self._is_cut = is_cut(document)
        self._has_begun = self._is_ending = self._is_complete = self._is_over = True
        self._num_sent = answer_bytes(document)  # nobody tells how many tokens it came in

    async def _end(self) -> None:
        """Raises RemoteFault for an answer that broke off. Covers output that was not seen."""
        if not (self._is_complete or self._is_ending):
            raise self._asked.fault("its answer has no end", BROKE_OFF)
        context, told = self.job.model.max_context, self._reader.counted
        prompt, held = told.prompt or 0, self._most_prompt
        is_longer = held < prompt <= self._ascent.most_of_calls(context)
        if is_longer and await self._charge.cover_prompt(prompt, held, self._sent):
            self._most_prompt = prompt
        output = min(told.output or 0, context * self.job.num_choices)
        if output > self._covered:  # the endpoint does not know the limit that was given
            self._charge.exceed(output)
            self._covered = output
        usage, site = self.usage(), self._site
        self._covered = await self._cover(usage.output)
        assert site is not None, "it answered"
        if self._charge.refuses(usage):
            fault = self._asked.fault("no count of its prompt", UNCOUNTED)
            site.failed(fault)
            raise fault
        site.answered()

    async def _cover(self, num_tokens: int) -> int:
        return await self._charge.cover(num_tokens, self._sent)

    def _sent(self) -> Usage:
        return self.usage() if self.job.stream else EMPTY

    def _stop(self) -> None:
        self._is_over = True
        if self._reading is not None:
            self._reading.cancel()

    def _output(self) -> StepOutput:
        """The request as the engine's observers know others."""
        served = self.served()
        usage = served.usage
        hits = {name: getattr(usage, name) for name in HIT_CLASSES}
        return StepOutput(
            request_id=self.job.request_id,
            index=0,
            tokens=(NO_ID,) * usage.output,
            counts=TokenCounts(prompt=usage.prompt, output=usage.output, **hits),
            finish=self._finish,
            miss_reasons=served.miss_reasons,
            timeline=self._when,
            error=self._error,
            last=True,
        )


def _split(data: bytes) -> list[bytes]:
    """The events in `data`, each with its end, and what is left."""
    parts, start = list[bytes](), 0
    for found in _EVENT_END.finditer(data):
        parts.append(data[start : found.end()])
        start = found.end()
    return [*parts, data[start:]]
