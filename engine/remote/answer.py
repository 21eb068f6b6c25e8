"""Turns what an engine elsewhere says of one request into our outputs: counts, lookup, reasons.

Pure, for one thread. A connector's report tells the prompt's hits when it is admitted. Without one
they are known with the engine's usage, at the end of the first sequence: until then all of the
prompt counts as computed. If the engine never says, all of it stays so, as UNREPORTED.
"""

from collections.abc import Mapping
from typing import Protocol

from engine.errors import RemoteFault
from engine.remote.protocol import Told
from engine.request import BlockRun, Lookup, Request, StepOutput, Timeline, TokenCounts
from engine.scheduling.lookup import miss_reasons
from tiers.blocks.keys import prefix_keys, token_bytes
from tiers.errors import MissReason
from tiers.telemetry.misses import Absence
from tiers.tier import TierName


class Report(Protocol):
    """What a connector beside the engine's scheduler says of a sequence: prompt tokens `local` to
    the engine, and `hits` below it by tier."""

    @property
    def local(self) -> int: ...
    @property
    def hits(self) -> Mapping[str, int]: ...
    @property
    def stop(self) -> MissReason:
        """Why there are no more hits."""
        ...

    @property
    def admitted_ns(self) -> int:
        """0: it waits."""
        ...

    @property
    def computed(self) -> int | None:
        """Completed prompt tokens, once it is over."""
        ...


class RunningAnswer:
    """A request and its `n` sequences. Invariant: exactly one of its outputs has `last` set."""

    def __init__(self, request: Request, block_size: int, now_ns: int) -> None:
        self.request = request
        self._block_size = block_size
        self._live = set(range(request.params.n))
        self._counts = TokenCounts(prompt=0)
        self._lookup: Lookup | None = None
        self._reasons: Mapping[MissReason, int] = {}
        self._num_output = 0
        self._when = Timeline(arrival_ns=request.arrival_ns or now_ns)
        self.has_begun = False  # its prompt is complete
        self.is_counted = False  # its hits are known

    @property
    def counts(self) -> TokenCounts:
        """Of the prompt."""
        return self._counts

    @property
    def over(self) -> bool:
        return not self._live

    @property
    def live(self) -> list[int]:
        return sorted(self._live)

    def begin(self, report: Report | None, now_ns: int) -> None:
        """The prompt is complete."""
        self.has_begun = True
        began_ns = (report.admitted_ns if report is not None else 0) or self._when.arrival_ns
        self._when = self._when._replace(
            admitted_ns=began_ns, loaded_ns=began_ns, first_token_ns=now_ns
        )
        self._counts = TokenCounts(prompt=len(self.request.tokens))
        if report is not None and report.admitted_ns:
            self._fix(len(self.request.tokens), report.local, report.hits, report.stop)

    def count(self, hits: Mapping[str, int] | None) -> None:
        """The first sequence is over. The engine says how many tokens of the prompt were cached,
        by tier, or nothing that can be believed."""
        if self.is_counted or not self.has_begun:
            return
        if hits is None:
            self._unreported()
        else:
            self._fix(len(self.request.tokens), hits.get(TierName.DEVICE, 0), hits)

    def cut_short(self, report: Report | None, *, unreported: bool = False) -> None:
        """The request ended during its prompt. Tokens that a report tells served or computed
        count; all of them, if it is `unreported` how many of them the engine computed."""
        if unreported:
            self._unreported()
        if report is None or not report.admitted_ns:
            return
        hits = sum(report.hits.values())
        done = max(report.local + hits, report.computed or 0)
        prompt = min(done, len(self.request.tokens))
        self._fix(prompt, report.local, report.hits, report.stop)
        self._when = self._when._replace(admitted_ns=report.admitted_ns)

    def output(
        self, index: int, now_ns: int, told: Told, error: str | RemoteFault | None = None
    ) -> StepOutput:
        """An output of sequence `index`, of what the engine told. A finish ends it."""
        if told.finish is not None:
            self._live.discard(index)
        if self.over:
            self.count(None)
        self._num_output += len(told.tokens)
        reasons, lookup = self._reasons, self._lookup
        self._reasons, self._lookup = {}, None  # told once
        return StepOutput(
            request_id=self.request.request_id,
            index=index,
            tokens=told.tokens,
            counts=self._counts.with_output(self._num_output),
            finish=told.finish,
            logprobs=told.logprobs,
            prompt_logprobs=told.prompt_logprobs,
            miss_reasons=reasons,
            lookup=lookup,
            timeline=self._when._replace(last_token_ns=now_ns),
            error=None if error is None else str(error),
            fault=error if isinstance(error, RemoteFault) else None,
            last=self.over,
        )

    def end(self, index: int) -> None:
        """A sequence ended before it began."""
        self._live.discard(index)

    def _unreported(self) -> None:
        self._fix(len(self.request.tokens), 0, {})
        if self.request.cache and self._lookup is not None:
            self._lookup = Lookup(
                self._lookup.runs, MissReason.UNREPORTED, self._block_size, self._lookup.absence
            )
            self._reasons = {MissReason.UNREPORTED: self._counts.miss}

    def _fix(
        self,
        prompt: int,
        device: int,
        below: Mapping[str, int],
        stop: MissReason = MissReason.ABSENT,
    ) -> None:
        hits = {tier: below.get(tier, 0) for tier in TierName} | {TierName.DEVICE: device}
        self._counts = TokenCounts.of(prompt, hits)
        self._lookup = self._looked(self._counts, stop)
        self._reasons = self._why(stop)
        self.is_counted = True

    def _looked(self, counts: TokenCounts, stop: MissReason) -> Lookup:
        """The lookup's result, as one run per tier, and why they `stop`."""
        size, runs, start = self._block_size, [], 0
        hits = (getattr(counts, f"hit_{tier}") for tier in TierName)
        keys = prefix_keys(self.request.scope.root(), token_bytes(self.request.tokens), size)
        for tier, tokens in zip(TierName, hits, strict=True):
            if tokens:
                last = keys[(start + tokens) // size - 1] if start + tokens >= size else None
                runs.append(BlockRun(tier, start, tokens, -(-tokens // size), last))
                start += tokens
        runs.append(BlockRun(None, start, counts.miss, -(-counts.miss // size)))
        if not self.request.cache:
            return Lookup(tuple(runs), MissReason.DISABLED, size)
        if counts.miss <= 1:
            return Lookup(tuple(runs), MissReason.TAIL, size)
        number = start // size
        parent = keys[number - 1] if number else self.request.scope.root()
        key = keys[number] if number < len(keys) else None
        stop = stop if key is not None else MissReason.TAIL
        return Lookup(tuple(runs), stop, size, Absence(parent=parent, key=key))

    def _why(self, stop: MissReason) -> dict[MissReason, int]:
        counts = self._counts
        if not counts.miss or counts.prompt < len(self.request.tokens):
            return {}
        if not self.request.cache:
            return {MissReason.DISABLED: counts.miss}
        return miss_reasons(counts, stop, self._block_size)
