"""The model and the copies of an engine in simulated time, which see what is done with KV.

`Watched` computes KV that proves its own prefix and checks every row that is read; `LateCopies`
makes copies between device and host arrive when they please.
"""

import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from engine.batch import Batch, Sampled, Span
from engine.scheduling.sequence import Sequence
from engine.testing.chain_runner import ChainRunner, advance, before, content_at
from tiers.blocks.frames import Frame
from tiers.blocks.keys import PrefixKey
from tiers.cache import TieredCache
from tiers.memory.device import Copy, DevicePool

BLOCK = 4
ADAPTERS = {"a": b"A" * 16, "b": b"B" * 16, "twin of a": b"A" * 16}  # contents by name


class Watched(ChainRunner):
    """Checks of every sequence that begins to run that it takes all that stands of its prompt.

    `rows` counts how often each row of KV was computed that others may read: by scope, position
    and what it proves. `prompt_tokens` counts by request what its first sequence computed of its
    prompt; each further one computes the last token again. With `broken` set the next step fails
    halfway.
    """

    def __init__(self, cache: TieredCache, sequence_of: Callable[[int], Sequence]) -> None:
        super().__init__(cache.pool.tensor, adapters=ADAPTERS)
        self._cache = cache
        self._sequence_of = sequence_of
        self._begun: set[int] = set()
        self._proofs: dict[int, list[int]] = {}  # what each row of a running sequence must hold
        self.num_checked = 0
        self.rows: Counter[tuple[PrefixKey, int, int]] = Counter()
        self.prompt_tokens: Counter[str] = Counter()
        self.wrong: AssertionError | None = None  # the engine takes it for a failure of the step
        self.broken = False

    def step(self, batch: Batch) -> list[Sampled]:
        try:
            return self._step(batch)
        except AssertionError as error:
            self.wrong = error
            raise

    def _step(self, batch: Batch) -> list[Sampled]:
        for span in batch.spans:
            if span.sequence_id not in self._begun:
                self._begun.add(span.sequence_id)
                self._check(self._sequence_of(span.sequence_id))
        if self.broken:
            self.broken = False
            super().step(Batch(batch.spans[::2]))
            raise RuntimeError("out of memory")
        sampled = super().step(batch)
        for span in batch.spans:
            self._prove(span, self._sequence_of(span.sequence_id))
            self._note(span, self._sequence_of(span.sequence_id))
        return sampled

    def _prove(self, span: Span, sequence: Sequence) -> None:
        """Every row that attention read or wrote is the KV of the sequence's own prefix."""
        proofs = self._proofs.setdefault(span.sequence_id, [])
        end = span.start + len(span.tokens)
        for position in range(len(proofs), end):
            before_it = proofs[-1] if proofs else before(sequence.request.scope.adapter)
            content = content_at(span.contents, position)
            proofs.append(advance(before_it, sequence.tokens[position], content))
        table = np.array(span.block_table[: -(-end // BLOCK)])
        rows = self._rows[table].transpose(0, 3, 1, 2, 4, 5).reshape(len(table) * BLOCK, -1)[:end]
        wrong = np.flatnonzero((rows != np.array(proofs[:end])[:, None]).any(axis=1))
        assert not len(wrong), f"rows {wrong} of {sequence.request.request_id} are not its own"

    def _note(self, span: Span, sequence: Sequence) -> None:
        end = span.start + len(span.tokens)
        if sequence.index == 0:
            num_prompt = max(0, min(end, sequence.num_prompt) - span.start)
            self.prompt_tokens[sequence.request.request_id] += num_prompt
        if span.write_kv and not sequence.chain.private:
            for position in range(span.start, end):
                row = sequence.chain.root, position, self._read(span, position)
                self.rows[row] += 1

    def forget(self, sequence_id: int) -> None:
        super().forget(sequence_id)
        self._begun.discard(sequence_id)
        self._proofs.pop(sequence_id, None)

    def _check(self, sequence: Sequence) -> None:
        """The first block that it computes does not stand, and no other computes it now.

        Blocks beyond may: behind a gap, as where a load failed, nothing is looked for.
        """
        if sequence.chain.private or sequence.params.prompt_logprobs is not None:
            return  # it asked to compute the prompt
        self.num_checked += 1
        first = sequence.num_standing // BLOCK
        for block in self._cache.index.match(sequence.chain)[first : first + 1]:
            assert block in sequence.blocks, f"{block} is computed twice"


class LateCopy(Copy):
    """A copy whose bytes are there when it was asked after `patience` times, or in stream order."""

    def __init__(self, patience: int, arrive: Callable[[], object]) -> None:
        super().__init__()
        self._patience = patience
        self._arrive: Callable[[], object] | None = arrive

    def done(self) -> bool:
        self._patience -= 1
        if self._patience < 0:
            self.arrive()
        return self._arrive is None

    def arrive(self) -> None:
        if self._arrive is not None:
            self._arrive()
            self._arrive = None


class LateCopies:
    """Lets a pool's copies take their time, as streams do; frames hold noise until then."""

    def __init__(self, pool: DevicePool, chance: random.Random) -> None:
        self._pool = pool
        self._chance = chance
        self._down: dict[int, LateCopy] = {}  # the last one to each frame
        self._copy_in = pool.copy_in
        pool.copy_out = self._out  # type: ignore[method-assign]
        pool.copy_in = self._in  # type: ignore[method-assign]

    def _out(self, slot: int, frame: Frame) -> Copy:
        rows = self._pool.tensor[slot].clone()
        frame.tensor.view(torch.int32).fill_(0x0BAD)
        late = LateCopy(self._chance.randrange(3), lambda: frame.tensor.copy_(rows))
        self._down[frame.number] = late
        return late

    def _in(self, frames: Seq[Frame], slots: Seq[int]) -> Copy:
        for frame in frames:
            if frame.number in self._down:
                self._down[frame.number].arrive()
        self._copy_in(frames, slots)
        return LateCopy(self._chance.randrange(3), lambda: None)
