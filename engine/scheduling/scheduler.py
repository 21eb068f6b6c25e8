"""Decides which tokens the next step computes, and what happens to the sequences afterwards.

    WAITING ─► LOADING ─► PREFILL ─► DECODE ─► FINISHED
       ▲                     │          │
       └─── preemption ──────┴──────────┘

Engine thread only. Each step takes running sequences first: one decode token each, then prefill
chunks within the step's budget. Then it takes new ones while there is room. Chunks end on block
boundaries.
"""

import math
import time
from collections.abc import Callable, Collection

from engine.batch import Batch, Span
from engine.request import FinishReason
from engine.scheduling.admission import Admission
from engine.scheduling.sequence import DECODE, FINISHED, PREFILL, WAITING, Sequence
from engine.scheduling.settings import SchedulerSettings
from engine.scheduling.shares import Backlog, ServedShares
from engine.scheduling.states import StatePlans
from tiers.blocks.keys import PrefixKey
from tiers.cache import TieredCache
from tiers.errors import CopyFailed, OutOfBlocks

SPAN_WORK = 16.0  # fixed cost of a sequence in a step, in prompt tokens


class Scheduler:
    """Owns the sequences. Invariant: each is in `waiting` or in `running`, never both."""

    def __init__(
        self,
        cache: TieredCache,
        settings: SchedulerSettings,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._cache = cache
        self._tables = cache.tables
        self._clock_ns = clock_ns
        self._settings = settings
        self._block_size = cache.layout.block_size
        self._served = ServedShares()
        self.running: list[Sequence] = []
        self.states: StatePlans | None = None  # of a model with recurrent states
        if cache.checkpoints is not None:
            self.states = StatePlans(cache, cache.checkpoints)
        self._admission = Admission(
            cache, settings, clock_ns, self._served, self.running, self.states
        )
        self.waiting = self._admission.waiting
        self.left: list[int] = []  # ids of sequences that stopped running, for the runner to forget
        self.num_preemptions = 0
        self.prompt_tokens_computed = 0
        self._num_moved = 0  # `cache.num_moved` when the tables were last right

    def add(self, sequence: Sequence) -> None:
        sequence.queued_ns = self._clock_ns()
        sequence.work = SPAN_WORK + sequence.num_tokens - self._admission.num_cached(sequence)
        self._served.enter(sequence.share)
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence, reason: FinishReason) -> None:
        """Remove a sequence in any state. Its full blocks stay in the cache."""
        if sequence.state in (PREFILL, DECODE):
            self._leave(sequence, returns=False)
        elif sequence.state is not FINISHED:
            self.waiting.remove(sequence)
            self._admission.close_ticket(sequence)
        if sequence.state is not FINISHED:
            self._served.leave(sequence.share)
        sequence.state, sequence.finish = FINISHED, reason

    def backlog(self) -> Backlog:
        """The waiting work, and how fast such work begins. Once per step."""
        return self._admission.begin_rate.look(self._clock_ns(), self.waiting.work())

    def detach(self, roots: Collection[PrefixKey]) -> None:
        """Make the sequences of scopes being purged private: what they compute from now on is not
        kept."""
        for sequence in [*self.running, *self.waiting]:
            if sequence.chain.root in roots:
                sequence.chain.private = True
                self._admission.close_ticket(sequence)

    def schedule(self) -> Batch:
        """The next step's work. Empty if sequences can only wait."""
        batch, settings = Batch(), self._settings
        for sequence in [s for s in self.running if s.state is DECODE and s.ready]:
            if sequence.state is DECODE:  # it was not preempted for one before it
                # One token, or a run of tokens that a grammar forced.
                self._add_span(batch, sequence, settings.mixed_step_tokens)
        budget = settings.step_tokens
        if batch.spans:
            budget = self._mixed_budget() - (batch.num_tokens - len(batch.spans))
        most = self._most_served()
        prefilling = [
            s
            for s in self.running
            if s.state is PREFILL and s.ready and self._served[s.share] < most
        ]
        prefilling.sort(key=lambda s: self._served[s.share])
        if prefilling and budget > 0:
            budget -= self._admit_spans(batch, budget, self._served[prefilling[0].share])
        for sequence in prefilling:
            if budget > 0 and sequence.state is PREFILL:
                budget -= self._add_span(batch, sequence, budget)
        if budget > 0:
            self._admit_spans(batch, budget, most)
        if len(self.waiting) and len(self.running) >= self._admission.num_places:
            self._admission.bring_up()
        if self._cache.num_moved != self._num_moved:
            self._look_again()
        return batch

    def _look_again(self) -> None:
        """Blocks in use got other slots, for which the tables of running sequences, and so those of
        the step's spans, are corrected."""
        self._num_moved = self._cache.num_moved
        for sequence in self.running:
            table = sequence.block_table
            table[:] = [b.slot for b in sequence.blocks[: len(table)] if b.slot is not None]

    def _mixed_budget(self) -> int:
        """The budget of prompt tokens while others decode. It grows with the ratio of sequences
        waiting for their first token to those waiting for their next, so that a burst of requests
        is not served in tiny chunks."""
        num_decoding = len([s for s in self.running if s.state is DECODE])
        num_first = len(self.running) - num_decoding + len(self.waiting)
        wanted = self._settings.mixed_step_tokens * num_first // num_decoding
        return max(self._settings.mixed_step_tokens, min(self._settings.step_tokens, wanted))

    def _most_served(self) -> float:
        """The bound above which a share gets no prefill in this step. Its prefill would lengthen
        the step for a less served share that decodes."""
        if not self._served.several:
            return math.inf
        decoding = (s.share for s in self.running if s.state is DECODE)
        least = min((self._served[share] for share in decoding), default=math.inf)
        return least + self._settings.mixed_step_tokens

    def _admit_spans(self, batch: Batch, budget: int, served: float = math.inf) -> int:
        """Begin waiting sequences of shares that were served less than `served`, and add their
        first tokens within the budget. Returns how many tokens."""
        added = 0
        for sequence in self._admission.begin(served):
            added += self._add_span(batch, sequence, budget - added)
            if added >= budget:
                break
        return added

    # Running sequences.

    def _add_span(self, batch: Batch, sequence: Sequence, budget: int) -> int:
        """Add the sequence's next tokens, at most about `budget`. Returns how many."""
        start, num_tokens = sequence.start, sequence.num_tokens
        end = self._chunk_end(start, num_tokens, budget)
        if self.states is not None:
            end = self.states.chunk_end(sequence, start, end)
        try:
            self._make_room(batch, sequence, end)
        except OutOfBlocks:
            return 0  # the sequence itself was preempted
        start = sequence.start  # it may have lost a shared tail
        self._served.charge(sequence.share, SPAN_WORK + end - start)
        sample = end == num_tokens and sequence.params.max_tokens != 0
        params, grammar = sequence.params, sequence.grammar
        batch.spans.append(
            Span(
                sequence_id=sequence.sequence_id,
                tokens=sequence.span_tokens(start, end),
                start=start,
                block_table=sequence.block_table,
                sample=sample,
                params=params,
                sampled_before=sequence.num_generated,
                history=sequence.history() if sample else None,
                num_prompt_tokens=sequence.num_prompt,
                adapter=sequence.request.adapter,
                allowed=grammar.allowed if sample and grammar is not None else None,
                targets=sequence.targets(start, end),
                contents=sequence.request.contents,
                write_kv=end > sequence.num_standing,
            )
        )
        return end - start

    def _chunk_end(self, start: int, num_tokens: int, budget: int) -> int:
        """The end of the chunk that begins at `start`: the last token or a block boundary."""
        if num_tokens - start <= budget:
            return num_tokens
        border = (start + budget) // self._block_size * self._block_size
        return min(num_tokens, max(border, (start // self._block_size + 1) * self._block_size))

    def _make_room(self, batch: Batch, sequence: Sequence, end: int) -> None:
        """Give slots to the blocks for positions up to `end`.

        Preempts others if needed, the last admitted first. Raises OutOfBlocks if the sequence
        itself was preempted and is waiting again.
        """
        while True:
            try:
                self._provide(sequence, end)
                return
            except OutOfBlocks:
                if self._admission.revoke_ticket():
                    continue
                victim = self.running[-1]
                self._preempt(victim)
                batch.spans = [s for s in batch.spans if s.sequence_id != victim.sequence_id]
                if victim is sequence:
                    raise

    def _provide(self, sequence: Sequence, end: int) -> None:
        size, blocks, table = self._block_size, sequence.blocks, sequence.block_table
        standing = sequence.num_standing
        if end > standing and standing % size and standing // size < len(blocks):
            number = standing // size
            block = blocks[number]
            if block.slot is not None and block.writer is not sequence.chain:
                try:
                    block = self._tables.own_tail(block, standing % size, sequence.chain)
                except CopyFailed:  # its rows are computed again
                    block = self._tables.drop_tail(block, sequence.chain)
                    sequence.num_standing = number * size
                blocks[number] = block
                del table[number:]
        num_blocks = -(-end // size)
        while len(blocks) < num_blocks:
            blocks.append(self._tables.new_block(sequence.chain))
        while len(table) < num_blocks:
            block = blocks[len(table)]
            table.append(block.slot if block.slot is not None else self._tables.provide(block))

    def _preempt(self, sequence: Sequence) -> None:
        """Send a sequence back to waiting. What it computed stays in the cache while there is
        room."""
        self._leave(sequence, returns=True)
        sequence.state = WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.put_back(sequence)

    def _leave(self, sequence: Sequence, *, returns: bool) -> None:
        self.running.remove(sequence)
        self.left.append(sequence.sequence_id)
        if self.states is not None:
            self.states.leave(sequence, returns=returns)
        self._tables.release(sequence.chain, sequence.blocks, sequence.num_standing)
        sequence.block_table = []
        sequence.num_standing = 0
        if not sequence.reads_cache:
            sequence.prompt_logprobs.clear()  # computed again from the beginning

    # After a step.

    def computed(self, sequence: Sequence, span: Span) -> None:
        """Note that the step computed this span, and commit the blocks that it filled."""
        end = span.start + len(span.tokens)
        self.prompt_tokens_computed += max(0, min(end, sequence.num_prompt) - span.start)
        sequence.prompt_done = max(sequence.prompt_done, min(end, sequence.num_prompt))
        first = sequence.num_standing // self._block_size
        if end <= sequence.num_standing:
            return
        sequence.num_standing, sequence.state_at = end, span.start
        for number in range(first, end // self._block_size):
            block = self._tables.commit(sequence.chain, number, sequence.blocks[number])
            sequence.blocks[number] = block
            assert block.slot is not None
            sequence.block_table[number] = block.slot
        if self.states is not None:
            self.states.computed(sequence, end)
        if end % self._block_size and end == sequence.num_tokens:
            self._tables.computed_tail(sequence.blocks[end // self._block_size])

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        """Let `twin` continue from the tokens of `sequence`, sharing its blocks.

        Without a free place it waits in line, and finds the prompt in the cache when it begins.
        """
        twin.counts, twin.miss_reasons = sequence.counts, sequence.miss_reasons
        twin.lookup, twin.prompt_done = sequence.lookup, sequence.num_standing
        twin.queued_ns, twin.loaded_ns = sequence.queued_ns, sequence.loaded_ns
        twin.admitted_ns = sequence.admitted_ns
        self._served.enter(twin.share)
        if len(self.running) >= self._admission.num_places:
            twin.work = SPAN_WORK + twin.num_tokens - self._admission.num_cached(twin)
            self.waiting.add(twin)
            return
        standing = sequence.num_standing
        if self.states is not None:
            standing = sequence.state_at
            self.states.fork(sequence, twin)
        elif self._cache.layout.has_states:
            # Only one sequence can continue the last block's state, so the twin computes it again.
            standing -= standing % self._block_size
        num_blocks = -(-standing // self._block_size)
        twin.blocks = self._tables.share(sequence.blocks[:num_blocks])
        twin.block_table = sequence.block_table[:num_blocks]
        twin.num_standing = standing
        twin.state = PREFILL
        self.running.append(twin)
