"""The model and the copies of an engine in simulated time, which see what is done with KV.

`Watched` computes KV that proves its own prefix and checks every row that is read; `LateCopies`
makes copies between device and host arrive when they please.
"""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import torch

from engine.batch import Batch
from engine.execution.sampler import Sampler
from tests.support.chain_runner import ChainRunner, advance, before, content_at
from tiers.blocks.part import Part
from tiers.memory.device import Copy

BLOCK = 4
VOCAB_SIZE = 51  # the tokens that the model chooses among, and the end
PEAKS = (3e38, math.inf, 1.0)  # the logit of the token that the model chooses; the others have less
ADAPTERS = {"a": b"A" * 16, "b": b"B" * 16, "twin of a": b"A" * 16}  # contents by name


class Watched(ChainRunner):
    """Checks of every sequence that begins to run that it takes all that stands of its prompt.

    `rows` counts how often each row of KV was computed that others may read: by scope, position
    and what it proves. `prompt_tokens` counts by request what its first sequence computed of its
    prompt; each further one computes the last token again. With `broken` set the next step fails
    halfway. Steps with a request of `poisoned` fail always; logits of `mad` are no numbers.
    """

    def __init__(self, cache, sequence_of):
        super().__init__(cache.pool.tensor, adapters=ADAPTERS)
        self._cache = cache
        self._sequence_of = sequence_of
        self._begun = set()
        self._proofs = {}  # what each row of a running sequence must hold
        self.num_checked = 0
        self.rows = Counter()
        self.prompt_tokens = Counter()
        self.wrong = None  # the engine takes it for a failure of the step
        self.broken = False
        self.poisoned = set()
        self.mad = set()
        self.copies_fail = False  # then a block may stand and be computed again
        self._sampler = Sampler(frozenset({VOCAB_SIZE - 1}))

    def step(self, batch):
        try:
            return self._step(batch)
        except AssertionError as error:
            self.wrong = error
            raise

    def _step(self, batch):
        for span in batch.spans:
            if span.sequence_id not in self._begun:
                self._begun.add(span.sequence_id)
                self._check(self._sequence_of(span.sequence_id))
        if self.broken:
            self.broken = False
            super().step(Batch(batch.spans[::2]))
            raise RuntimeError("out of memory")
        names = {self._name(span) for span in batch.spans}
        if names & self.poisoned:
            super().step(Batch(batch.spans[:1]))
            raise ValueError("a fault in one row")
        sampled = self._through_sampler(batch, super().step(batch))
        for span in batch.spans:
            self._prove(span, self._sequence_of(span.sequence_id))
            self._note(span, self._sequence_of(span.sequence_id))
        return sampled

    def _name(self, span):
        return self._sequence_of(span.sequence_id).request.request_id

    def _through_sampler(self, batch, chosen):
        """The same choices made by the real sampler, of logits as extreme as they come."""
        spans = [span for span in batch.spans if span.sample]
        by_id = {one.sequence_id: one for one in chosen}
        if not spans:
            return chosen
        logits = torch.zeros(len(spans), VOCAB_SIZE)
        for row, span in enumerate(spans):
            plain = span.params == replace(span.params, temperature=0, logit_bias={})
            plain = plain and span.history is None
            peak = PEAKS[span.sequence_id % 3] if plain else PEAKS[span.sequence_id % 2]
            logits[row] = -peak if math.isfinite(peak) else 0.0
            logits[row, by_id[span.sequence_id].token] = peak
            if self._name(span) in self.mad:
                logits[row, span.sequence_id % VOCAB_SIZE] = math.nan
        for span, one in zip(spans, self._sampler.sample(logits, spans), strict=True):
            if one.error is None:
                assert by_id[span.sequence_id].token == one.token, (span.params, one)
            else:
                by_id[span.sequence_id] = one
        return [by_id[span.sequence_id] for span in batch.spans]

    def _prove(self, span, sequence):
        """Every row that attention read or wrote is the KV of the sequence's own prefix."""
        proofs = self._proofs.setdefault(span.sequence_id, [])
        end = span.start + len(span.tokens)
        for position in range(len(proofs), end):
            before_it = proofs[-1] if proofs else before(sequence.request.scope.adapter)
            content = content_at(span.contents, position)
            proofs.append(advance(before_it, sequence.tokens[position], content))
        table = np.array(span.block_table[: -(-end // BLOCK)])
        rows = self._rows[table].transpose(0, 3, 1, 2, 4, 5).reshape(len(table) * BLOCK, -1)[:end]
        differs = rows != np.array(proofs[:end])[:, None]
        window = self._cache.layout.layers[-1].window
        if window is not None:  # its layers follow one; of what lies behind it, they read nothing
            lasting = differs.shape[1] // len(self._cache.layout.layers)
            differs[: max(0, span.start - window + 1), lasting:] = False
        wrong = np.flatnonzero(differs.any(axis=1))
        assert not len(wrong), f"rows {wrong} of {sequence.request.request_id} are not its own"

    def _note(self, span, sequence):
        end = span.start + len(span.tokens)
        if sequence.index == 0:
            num_prompt = max(0, min(end, sequence.num_prompt) - span.start)
            self.prompt_tokens[sequence.request.request_id] += num_prompt
        if span.write_kv and not sequence.chain.private:
            for position in range(span.start, end):
                row = sequence.chain.root, position, self._read(span, position)
                self.rows[row] += 1

    def forget(self, sequence_id):
        super().forget(sequence_id)
        self._begun.discard(sequence_id)
        self._proofs.pop(sequence_id, None)

    def _check(self, sequence):
        """The first block that it computes does not stand, and no other computes it now.

        Blocks beyond may: behind a gap, as where a load failed, nothing is looked for.
        """
        if sequence.chain.private or sequence.params.prompt_logprobs is not None:
            return  # it asked to compute the prompt
        if self.copies_fail:
            return
        self.num_checked += 1
        first = sequence.num_standing // BLOCK
        for block in self._cache.index.match(sequence.chain)[first : first + 1]:
            assert block in sequence.blocks or not block.is_whole, f"{block} is computed twice"


class LateCopy(Copy):
    """A copy whose bytes are there when it was asked after `patience` times, or in stream order."""

    def __init__(self, patience, arrive):
        super().__init__()
        self._patience = patience
        self._arrive = arrive

    def done(self):
        self._patience -= 1
        if self._patience < 0:
            self.arrive()
        return self._arrive is None

    query = done  # as the pool asks an event

    def arrive(self):
        if self._arrive is not None:
            self._arrive()
            self._arrive = None


class LateCopies:
    """Lets a pool's copies take their time, as streams do; what they go to holds noise until then,
    and what they come from is read at the very end. A device refuses a copy when it is begun."""

    def __init__(self, pool, chance):
        self._pool = pool
        self._chance = chance
        self._down = {}  # the last one to each frame
        pool.copy_out = self._out  # type: ignore[method-assign]
        pool.copy_in = self._in  # type: ignore[method-assign]
        pool.settle = self._settle  # type: ignore[method-assign]

    def _out(self, slot, frame):
        self._pool._put([])
        self._settle(slot)
        target, rows = self._pool._pair(frame.tensor, self._pool.tensor[slot].clone(), frame.part)
        frame.tensor.view(torch.int32).fill_(0x0BAD)
        late = LateCopy(self._chance.randrange(3), lambda: target.copy_(rows))
        self._down[frame.number] = late
        return late

    def _in(self, frames, slots, parts=()):
        self._pool._put([])
        for frame in frames:
            if frame.number in self._down:
                self._down[frame.number].arrive()
        for slot in slots:
            self._settle(slot)  # an earlier copy to it comes first in the stream
        pairs = []
        for frame, slot, part in zip(
            frames, slots, parts or [Part.WHOLE] * len(slots), strict=True
        ):
            pairs.append(self._pool._pair(self._pool.tensor[slot], frame.tensor, part))
            pairs[-1][0].view(torch.int32).fill_(0x0BAD)

        def arrive():
            for target, source in pairs:
                target.copy_(source)

        late = LateCopy(self._chance.randrange(3), arrive)
        numbers = map(self._pool.places.whole_of, slots)
        self._pool._arriving |= dict.fromkeys(numbers, late)  # type: ignore[arg-type]
        return late

    def _settle(self, slot):
        late = self._pool._arriving.pop(self._pool.places.whole_of(slot), None)
        if late is not None:
            late.arrive()  # type: ignore[attr-defined]


class Refusing:
    """Counts a pool's copies, and refuses those whose numbers it is told."""

    def __init__(self, pool, refused):
        self.num_copies = self.num_refused = 0
        self._put = pool._put
        self._refused = refused
        pool._put = self.put  # type: ignore[method-assign]

    def put(self, pairs, *how):
        """As the pool does, with one target that is not there."""
        number = self.num_copies
        self.num_copies += 1
        if number not in self._refused:
            return self._put(pairs, *how)
        self.num_refused += 1
        return self._put([*list(pairs)[:-1], (torch.empty(2), torch.empty(3))], *how)
