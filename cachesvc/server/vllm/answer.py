"""Turns vLLM's outputs of one request into the engine's: counts, hits by tier, logprobs.

Pure except for the clock; used on the engine's loop. The prompt's counts are fixed at its first
output or its end. What the node could not deliver by then, vLLM computed: it is no hit.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from cachesvc.vllm.reports import RequestReport
from engine.request import (
    BlockRun,
    FinishReason,
    Lookup,
    Request,
    StepOutput,
    Timeline,
    TokenCounts,
    TokenLogprob,
)
from tiers.blocks.keys import prefix_keys, token_bytes
from tiers.errors import MissReason
from tiers.telemetry.misses import Absence
from tiers.tier import TierName

_FINISHES: Mapping[str, FinishReason] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


class RunningAnswer:
    """A request and its `n` sequences. Invariant: exactly one of its outputs has `last` set."""

    def __init__(self, request: Request, block_size: int, now_ns: int) -> None:
        self.request = request
        self._block_size = block_size
        self._live = set(range(request.params.n))
        self._counts: TokenCounts | None = None
        self._lookup: Lookup | None = None
        self._lookup_given = False
        self._num_output = 0
        self._when = Timeline(arrival_ns=request.arrival_ns or now_ns)

    @property
    def is_admitted(self) -> bool:
        return self._counts is not None

    @property
    def num_computed(self) -> int:
        """Prompt tokens that were not cached."""
        return self._counts.miss if self._counts is not None else 0

    @property
    def over(self) -> bool:
        return not self._live

    @property
    def live(self) -> list[int]:
        return sorted(self._live)

    def admit(self, report: RequestReport | None, num_cached: int, now_ns: int) -> None:
        """The prompt is complete. By vLLM's count, `num_cached` of its tokens were not computed."""
        below = dict(report.hits) if report is not None else {}
        external = sum(below.values())
        device = max(0, num_cached - external)
        if report is not None and report.is_short:  # vLLM counts what failed to load as cached
            device = report.local
        self._fix(len(self.request.tokens), device, below)
        admitted_ns = report.admitted_ns if report is not None else 0
        began_ns = admitted_ns or self._when.arrival_ns
        self._when = self._when._replace(
            admitted_ns=began_ns, loaded_ns=began_ns, first_token_ns=now_ns
        )

    def cut_short(self, report: RequestReport | None) -> None:
        """The request ended during its prompt. Tokens served or computed by then count."""
        if report is None or not report.admitted_ns:
            self._counts = TokenCounts(prompt=0)
            return
        done = max(report.local + report.external, report.computed or 0)
        self._fix(min(done, len(self.request.tokens)), report.local, dict(report.hits))
        self._when = self._when._replace(admitted_ns=report.admitted_ns)

    def output(
        self,
        index: int,
        now_ns: int,
        *,
        tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprob] = (),
        prompt_logprobs: Sequence[TokenLogprob] = (),
        finish: FinishReason | None = None,
        error: str | None = None,
    ) -> StepOutput:
        """An output of sequence `index`. `finish` ends it."""
        if finish is not None:
            self._live.discard(index)
        self._num_output += len(tokens)
        given, self._lookup_given = self._lookup_given, True
        counts = self._counts or TokenCounts(prompt=0)
        return StepOutput(
            request_id=self.request.request_id,
            index=index,
            tokens=tuple(tokens),
            counts=counts.with_output(self._num_output),
            finish=finish,
            logprobs=tuple(logprobs),
            prompt_logprobs=tuple(prompt_logprobs),
            miss_reasons={} if given else self._reasons(),
            lookup=None if given else self._lookup,
            timeline=self._when._replace(last_token_ns=now_ns),
            error=error,
            last=self.over,
        )

    def end(self, index: int) -> None:
        """A sequence ended before it began."""
        self._live.discard(index)

    def _fix(self, prompt: int, device: int, below: Mapping[str, int]) -> None:
        hits = {tier: below.get(tier, 0) for tier in TierName} | {TierName.DEVICE: device}
        self._counts = TokenCounts.of(prompt, hits)
        self._lookup = self._looked(self._counts)

    def _looked(self, counts: TokenCounts) -> Lookup:
        """The lookup's result, as one run per tier. vLLM reports no reason for a miss except
        absence."""
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
        absence = Absence(parent=parent, key=key)
        stop = MissReason.ABSENT if key is not None else MissReason.TAIL
        return Lookup(tuple(runs), stop, size, absence)

    def _reasons(self) -> dict[MissReason, int]:
        counts = self._counts
        if counts is None or not counts.miss or counts.prompt < len(self.request.tokens):
            return {}
        if not self.request.cache:
            return {MissReason.DISABLED: counts.miss}
        whole = max(0, (counts.prompt - 1) // self._block_size * self._block_size - counts.hit)
        reasons = {MissReason.ABSENT: whole, MissReason.TAIL: counts.miss - whole}
        return {reason: tokens for reason, tokens in reasons.items() if tokens}


def finish_of(reason: str | None) -> FinishReason | None:
    """Our finish reason for vLLM's. A reason that we do not have is an error."""
    return None if reason is None else _FINISHES.get(reason, FinishReason.ERROR)


def logprobs_of(
    tokens: Sequence[int], entries: Sequence[Mapping[int, Any] | None] | None, most: int | None
) -> list[TokenLogprob]:
    """The logprobs of vLLM's entries, one per token: the token's own and the `most` likely ones."""
    if entries is None or most is None:
        return []
    logprobs = []
    for token, entry in zip(tokens, entries, strict=True):
        if entry is None or token not in entry:
            continue
        likely = sorted(entry.items(), key=lambda item: item[1].rank)
        top = tuple((number, value.logprob) for number, value in islice(likely, most))
        logprobs.append(TokenLogprob(token, entry[token].logprob, top, entry[token].rank or 0))
    return logprobs
