"""A request and its sequences: `n` samples of one prompt, counted and answered together."""

import os
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

import xxhash

from engine.batch import Sampled
from engine.request import FinishReason, Request, StepOutput, Timeline, TokenCounts
from engine.scheduling.sequence import Sequence
from tiers.blocks.chain import Chain
from tiers.blocks.contents import block_contents
from tiers.blocks.keys import PrefixKey


class SequenceGroup:
    """The live sequences of one request. Engine thread only.

    The first sequence computes the prompt once. The others fork from it afterwards.
    """

    def __init__(self, request: Request, block_size: int) -> None:
        self.request = request
        self.sequences: list[Sequence] = []
        self.num_output = 0
        self._block_size = block_size
        self._num_due = request.params.n - 1
        self._reasons_given = False

    @property
    def done(self) -> bool:
        """Whether no sequence is live and none is still to be forked."""
        return not self.sequences and not self._num_due

    def first(self, sequence_id: int) -> Sequence:
        """The sequence that computes the prompt."""
        request = self.request
        root = request.scope.root() if request.cache else PrefixKey(os.urandom(16))
        chain = Chain(
            root,
            request.tokens,
            self._block_size,
            block_contents(request.contents, self._block_size),
            private=not request.cache,
        )
        return self._make(sequence_id, 0, chain)

    def due_twins(self, first: Sequence, new_id: Callable[[], int]) -> Iterator[Sequence]:
        """Make the other sequences once the first has computed its prompt. Each is to be forked
        from it."""
        while self._num_due:
            index = self.request.params.n - self._num_due
            self._num_due -= 1
            yield self._make(new_id(), index, first.chain.copy())

    def ended(self, sequence: Sequence) -> None:
        """Take in the end of a sequence. Those still to be forked from it will never be."""
        self.sequences.remove(sequence)
        self._num_due = 0

    def output(
        self,
        sequence: Sequence,
        result: Sampled | None,
        now_ns: int,
        *,
        tokens: Seq[int] = (),
        error: str | None = None,
    ) -> StepOutput:
        """The output of this step for a sequence. `result` chose the first of `tokens`. Without a
        result, a grammar forced them all."""
        given, self._reasons_given = self._reasons_given, True
        prompt_logprobs = tuple(sequence.prompt_logprobs) if not given else ()
        return StepOutput(
            request_id=self.request.request_id,
            index=sequence.index,
            tokens=tuple(tokens),
            counts=self._counts(sequence),
            prompt_logprobs=prompt_logprobs,
            num_jumped=len(tokens) - (result is not None and len(tokens) > 0),
            finish=sequence.finish,
            logprobs=(result.logprob,) if result is not None and result.logprob else (),
            miss_reasons={} if given or sequence.cut_short else sequence.miss_reasons,
            lookup=None if given else sequence.lookup,
            timeline=Timeline(
                arrival_ns=self.request.arrival_ns or sequence.queued_ns,
                admitted_ns=sequence.admitted_ns,
                loaded_ns=sequence.loaded_ns,
                first_token_ns=sequence.first_token_ns,
                last_token_ns=now_ns,
            ),
            error=error,
            last=self.done,
        )

    def _make(self, sequence_id: int, index: int, chain: Chain) -> Sequence:
        params, grammar = self.request.params, self.request.grammar
        if index:  # only the first reports on the prompt
            seed = seed_of(params.seed, index) if params.seed is not None else None
            params = replace(params, seed=seed, prompt_logprobs=None)
        sequence = Sequence(
            sequence_id=sequence_id,
            index=index,
            request=self.request,
            params=params,
            chain=chain,
            tokens=array("i", self.request.tokens),
            num_prompt=len(self.request.tokens),
            grammar=grammar.begin(params.min_tokens) if grammar is not None else None,
        )
        self.sequences.append(sequence)
        return sequence

    def _counts(self, sequence: Sequence) -> TokenCounts:
        """The request's tokens by class. If it ended within its prompt, only tokens served or
        computed count."""
        counts = sequence.counts or TokenCounts(prompt=0)
        if sequence.cut_short:
            counts = counts._replace(prompt=max(counts.hit, sequence.prompt_done))
        return counts.with_output(self.num_output)


def unbegun(request: Request, error: str, now_ns: int) -> StepOutput:
    """The only output of a request that failed before it had a sequence."""
    return StepOutput(
        request_id=request.request_id,
        index=0,
        tokens=(),
        counts=TokenCounts(prompt=0),
        finish=FinishReason.ERROR,
        timeline=Timeline(arrival_ns=request.arrival_ns or now_ns, last_token_ns=now_ns),
        error=error,
        last=True,
    )


def seed_of(seed: int, index: int) -> int:
    """The seed of a further sample. Unlike `seed + index`, it does not collide with other
    requests'."""
    digest = xxhash.xxh3_64_intdigest(f"{seed}:{index}".encode())
    return digest >> 1  # cut to the width of a seed
