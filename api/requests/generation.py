"""One client request from submission to its last output: engine, text and coverage meet here.

A request has one or more prompts. Each prompt is an engine request with `n` choices. The engine's
outputs become `Delta`s of text that is safe to send. A token counts as output if it reaches a
choice that has not ended. The token that completes a stop string counts; tokens computed after it
do not. Tokens that the hold does not cover never count. Event loop only.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add

from api.job import Delta, Job, Served, Transcript
from api.requests.bridge import OutputBridge
from api.requests.metering import LedgerCharge
from api.served_model import EngineClient
from billing.errors import GateError
from billing.gate.outcomes import Outcome
from billing.usage import EMPTY, Usage
from engine.errors import RemoteFault
from engine.request import (
    FinishReason,
    Lookup,
    Request,
    StepOutput,
    Timeline,
    TokenCounts,
    TokenLogprob,
)
from engine.text.detokenizer import IncrementalDetokenizer
from tiers.errors import MissReason

ANSWERED = frozenset({FinishReason.STOP, FinishReason.LENGTH})  # the reasons clients see


@dataclass(slots=True)
class _Choice:
    """One sequence's text side."""

    number: int
    detokenizer: IncrementalDetokenizer
    num_tokens: int = 0
    finish: FinishReason | None = None
    ended_here: bool = False  # by a stop string or lack of money; the engine does not know yet

    def read(self, output: StepOutput, allowed: int) -> Delta | None:
        """Takes up to `allowed` tokens; ends at a stop string or when the engine ends it."""
        text: list[str] = []
        used = 0
        for token in output.tokens[:allowed]:
            used += 1
            if output.finish is FinishReason.STOP and used == len(output.tokens):
                break  # the end-of-sequence or stop token counts but has no text
            text.append(self.detokenizer.feed((token,)))
            if self.detokenizer.stopped:
                self.finish = FinishReason.STOP
                self.ended_here = output.finish is None
                break
        self.num_tokens += used
        if self.finish is None and output.finish is not None and used == len(output.tokens):
            self.finish = output.finish
            text.append(self.detokenizer.flush())
        if not used and self.finish is None:
            return None
        reason = self.finish if self.finish in ANSWERED else None
        logprobs = output.logprobs[:used]
        stop = self.detokenizer.stop_string
        return Delta(self.number, "".join(text), output.tokens[:used], logprobs, reason, stop)

    def cut(self, refusal: GateError | None) -> Delta:
        """Ends the choice, as if at its length, and returns the text that was held back."""
        self.finish = FinishReason.LENGTH
        self.ended_here = True
        return Delta(self.number, self.detokenizer.flush(), finish=self.finish, refusal=refusal)


@dataclass(slots=True)
class _Part:
    """The state of one prompt's engine request."""

    choices: list[_Choice]
    counts: TokenCounts | None = None
    timeline: Timeline = field(default_factory=Timeline)
    lookup: Lookup | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    over: bool = False

    @property
    def is_reported(self) -> bool:
        """The engine has not failed to say what it had cached."""
        return self.lookup is None or self.lookup.stop is not MissReason.UNREPORTED

    @property
    def ended(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)


class Generation:
    """Submits a `Job`, yields its text and reports its result. Used once."""

    def __init__(
        self, job: Job, coverage: LedgerCharge, *, engine: EngineClient, bridge: OutputBridge
    ) -> None:
        self.job = job
        self._engine = engine
        self._bridge = bridge
        self._coverage = coverage
        self._outcome = Outcome.FINISHED
        self._error: str | None = None
        self._fault: RemoteFault | None = None
        self._jumped_tokens = 0
        num_told = job.num_choices if job.turn is not None else 0
        self._said: list[tuple[list[str], list[int]]] = [([], []) for _ in range(num_told)]
        self._miss_reasons: Counter[MissReason] = Counter()
        n = job.params.n
        self._parts = {
            engine_id: _Part(
                [
                    _Choice(
                        number * n + i,
                        IncrementalDetokenizer(job.model.tokenizer, job.stop, shown=job.markers),
                    )
                    for i in range(n)
                ]
            )
            for number, engine_id in enumerate(job.engine_ids)
        }
        self._feed = bridge.open(job.engine_ids)

    def submit(self) -> None:
        """Submits every prompt to the engine. If it refuses one, `close` aborts those before it.

        Raises the engine's refusal.
        """
        for number, engine_id in enumerate(self.job.engine_ids):
            self._engine.submit(self._request(engine_id, number))

    def close(self) -> None:
        """Aborts what still runs and drops further outputs."""
        self._abort_all(FinishReason.ABORT)
        self._bridge.close(self._feed)

    def cancel(self) -> None:
        """Aborts the work of a client that disconnected. `deltas` continues to the last output."""
        if self._outcome is Outcome.FINISHED and not self._over:
            self._outcome = Outcome.CLIENT_GONE
            self._abort_all(FinishReason.ABORT)

    def fail(self, reason: str) -> None:
        """Aborts the work after an error of the wire, as a failure of the server."""
        self._abort_all(FinishReason.ABORT)
        if self._outcome is Outcome.FINISHED:
            self._outcome, self._error = Outcome.FAILED, reason

    async def deltas(self, idle_s: float | None = None) -> AsyncIterator[list[Delta]]:
        """Yields new text as it comes, and an empty list after `idle_s` of silence."""
        try:
            while not self._over:
                outputs = await self._feed.take(idle_s)
                if not outputs:  # a long silence: renew the hold
                    await self._cover(self.output_tokens)
                    yield []
                elif deltas := await self._read(outputs):
                    yield deltas
        finally:
            self._bridge.close(self._feed)

    async def _cover(self, output_tokens: int) -> int:
        return await self._coverage.cover(output_tokens, self._sent)

    def _sent(self) -> Usage:
        """What the client has received so far; nothing if the answer is sent whole."""
        return self.usage() if self.job.stream else EMPTY

    def usage(self) -> Usage:
        """What has been served so far."""
        used = [self._used(p, p.counts) for p in self._parts.values() if p.counts is not None]
        return reduce(add, used) if used else EMPTY

    def _used(self, part: _Part, counted: TokenCounts) -> Usage:
        """What has been served so far of one prompt, whose tokens the engine counted."""
        job, counts = self.job, counted.with_output(sum(c.num_tokens for c in part.choices))
        written = self._written(part, counts.prompt)
        marked = self._written(part, min(counts.prompt, job.tokens_marked))
        for_1h = self._written(part, min(counts.prompt, job.tokens_for_1h))
        return Usage.from_counts(
            counts,
            written=written - marked,
            written_marked=marked - for_1h,
            written_1h=for_1h,
            marked=job.tokens_marked,
            is_reported=part.is_reported,
        )

    def _written(self, part: _Part, num_tokens: int) -> int:
        """Of the first `num_tokens`, those computed in full blocks, which are committed.

        A fully cached prompt computes its last token and commits nothing. What an engine did not
        report is not known to be written.
        """
        counts, lookup = part.counts, part.lookup
        if not self.job.cache or counts is None or lookup is None:
            return 0
        kept = num_tokens // lookup.block_size * lookup.block_size
        unknown = not part.is_reported or counts.miss <= 1
        return 0 if unknown else max(0, kept - counts.hit)

    def served(self) -> Served:
        """What was served, and how it ended."""
        first = next(iter(self._parts.values()))
        reasons = dict(self._miss_reasons)
        parts = self._parts.values()
        return Served(
            self._outcome,
            self.usage(),
            reasons,
            first.timeline,
            self._error,
            self._fault,
            self._coverage.refusal if self._outcome is Outcome.BUDGET else None,
            lookups=tuple(part.lookup for part in parts if part.lookup is not None),
            finishes=tuple(choice.finish for choice in self._choices),
            prompt_logprobs=tuple(part.prompt_logprobs for part in parts),
            transcripts=tuple(
                Transcript("".join(texts), tuple(tokens)) for texts, tokens in self._said
            ),
            divergence=self.job.divergence,
            replayed_tokens=self.job.replayed_tokens,
            jumped_tokens=self._jumped_tokens,
        )

    @property
    def answered(self) -> bool:
        """Every choice has finished; only the engine's last output may be missing."""
        return all(part.ended for part in self._parts.values())

    @property
    def _over(self) -> bool:
        """The engine has sent its last output for every prompt."""
        return all(part.over for part in self._parts.values())

    @property
    def _choices(self) -> list[_Choice]:
        return [choice for part in self._parts.values() for choice in part.choices]

    @property
    def output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    async def _read(self, outputs: Sequence[StepOutput]) -> list[Delta]:
        live = sum(
            len(output.tokens)
            for output in outputs
            if self._parts[output.request_id].choices[output.index].finish is None
        )
        sent = self.output_tokens
        covered = await self._cover(sent + live) if live else sent
        allowance = covered - sent
        deltas: list[Delta] = []
        for output in outputs:
            part = self._parts[output.request_id]
            self._note(part, output)
            choice = part.choices[output.index]
            if choice.finish is None and (delta := choice.read(output, allowance)):
                allowance -= len(delta.tokens)
                deltas.append(delta)
        if allowance == 0 and live > covered - sent:
            deltas += self._end_uncovered()
        self._stop_choices()
        for delta in deltas if self._said else ():
            texts, tokens = self._said[delta.choice]
            texts.append(delta.text)
            tokens += delta.tokens
        return deltas

    def _note(self, part: _Part, output: StepOutput) -> None:
        part.counts = output.counts
        part.timeline = output.timeline
        part.prompt_logprobs = part.prompt_logprobs or output.prompt_logprobs
        part.lookup = part.lookup or output.lookup
        part.over = part.over or output.last
        self._jumped_tokens += output.num_jumped
        self._miss_reasons.update(output.miss_reasons)
        unasked = self._outcome is Outcome.FINISHED and output.finish not in ANSWERED
        if output.finish is not None and unasked:
            self._outcome = Outcome.FAILED
            self._error = output.error or "the server ended the request"
            self._fault = output.fault

    def _end_uncovered(self) -> list[Delta]:
        """Ends every open choice, because the next token is not paid for."""
        if self._outcome is Outcome.FINISHED:
            self._outcome = Outcome.BUDGET
        return [each.cut(self._coverage.refusal) for each in self._choices if each.finish is None]

    def _stop_choices(self) -> None:
        """Aborts in the engine the choices that ended here by a stop string or lack of money."""
        for engine_id, part in self._parts.items():
            for index, choice in enumerate(part.choices):
                if part.over:
                    choice.finish = choice.finish or FinishReason.ABORT
                elif choice.ended_here:
                    choice.ended_here = False
                    self._engine.abort(engine_id, choice.finish or FinishReason.STOP, index)

    def _abort_all(self, reason: FinishReason) -> None:
        for engine_id, part in self._parts.items():
            if not part.over:
                self._engine.abort(engine_id, reason)

    def _request(self, engine_id: str, number: int) -> Request:
        job = self.job
        return Request(
            request_id=engine_id,
            tokens=job.prompts[number],
            params=replace(job.params, stop=job.stop) if job.stop else job.params,
            scope=job.scope,
            adapter=job.model.adapter,
            grammar=job.grammar,
            contents=job.contents,
            cache=job.cache,
            arrival_ns=job.arrival_ns,
            share=job.share,
            keeps=tuple(keep.num_tokens for keep in job.keeps),
        )
