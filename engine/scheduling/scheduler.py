"""Which tokens are computed in the next step, and what becomes of the sequences after it.

    WAITING ─► LOADING ─► PREFILL ─► DECODE ─► FINISHED
       ▲                     │          │
       └─── preemption ──────┴──────────┘

Engine thread only. Each step: running sequences first (one decode token each, then prefill chunks
within the step's budget), then new ones as long as there is room. Chunks end on block borders.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from engine.batch import Batch, Embedded, Span
from engine.request import FinishReason, Lookup
from engine.scheduling.embeddings import Embeddings, embedded, unread
from engine.scheduling.lookup import count_hits, miss_reasons, runs_of
from engine.scheduling.queue import QueueOrder, WaitingQueue
from engine.scheduling.sequence import DECODE, FINISHED, LOADING, PREFILL, WAITING, Sequence
from engine.scheduling.shares import Backlog, BeginRate, ServedShares
from tiers.blocks.keys import PrefixKey
from tiers.cache import TieredCache
from tiers.errors import OutOfBlocks
from tiers.memory.tails import Tail, TailCase
from tiers.transfer.ticket import Progress, Ticket

SPAN_WORK = 16.0  # what a sequence costs in a step beside its tokens, as tokens of a prompt
AHEAD = 2  # waiting requests whose prefix is brought up while all places are taken
RESERVED = 8  # one in so many places is for shares of which nothing runs


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Bounds of one step. Token budgets are rounded down to whole blocks, one at least."""

    max_running: int = 64
    step_tokens: int = 512  # prompt tokens computed in a step
    mixed_step_tokens: int = 128  # the same while others decode, so that they do not stall; more
    # where more wait for their first token than decode
    max_tickets: int = 8  # waiting requests whose prefix may be brought up at once; those that wait
    # for a block that another request computes pin what that one does, and do not count
    order: QueueOrder = QueueOrder.CACHED_FIRST
    max_passed_s: float = 5.0  # the longest that a request is passed by for better cached ones


class Scheduler:
    """Owns the sequences. Invariant: each is in `waiting` or in `running`, never in both."""

    def __init__(
        self,
        cache: TieredCache,
        settings: SchedulerSettings,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        embeddings: Embeddings | None = None,
    ) -> None:
        self._cache = cache
        self._embeddings = embeddings  # None: the model sees no images
        self._tables = cache.tables
        self._clock_ns = clock_ns
        self._settings = settings
        self._block_size = cache.layout.block_size
        self._served = ServedShares()
        self._begin_rate = BeginRate()
        self.waiting = WaitingQueue(
            settings.order, max_passed_s=settings.max_passed_s, served=self._served
        )
        self.running: list[Sequence] = []
        self._ahead: list[Sequence] = []  # brought up while all places are taken
        self.left: list[int] = []  # sequence ids that stopped running, for the runner to forget
        self.num_preemptions = 0
        self.prompt_tokens_computed = 0

    def add(self, sequence: Sequence) -> None:
        sequence.queued_ns = self._clock_ns()
        sequence.work = SPAN_WORK + sequence.num_tokens - self._num_cached(sequence)
        self._served.enter(sequence.share)
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take a sequence out wherever it is; its full blocks stay in the cache."""
        if sequence.state in (PREFILL, DECODE):
            self._leave(sequence)
        elif sequence.state is not FINISHED:
            self.waiting.remove(sequence)
            self._close_ticket(sequence)
        if sequence.state is not FINISHED:
            self._served.leave(sequence.share)
        sequence.state, sequence.finish = FINISHED, reason
        self._drop_images(sequence)

    def backlog(self) -> Backlog:
        """What waits, and how fast it begins. Once per step."""
        waiting = self.waiting.work()
        self._begin_rate.look(self._clock_ns(), waits=bool(waiting))
        return Backlog(waiting, self._begin_rate.tokens_per_s)

    def detach(self, roots: Collection[PrefixKey]) -> None:
        """Scopes are being purged: what their sequences compute from here on is kept by nobody."""
        for sequence in [*self.running, *self.waiting]:
            if sequence.chain.root in roots:
                sequence.chain.private = True
                self._close_ticket(sequence)

    def schedule(self) -> Batch:
        """The next step's work. Empty when nobody can make progress but by waiting."""
        batch, settings = Batch(), self._settings
        for sequence in [s for s in self.running if s.state is DECODE and s.ready]:
            if sequence.state is DECODE:  # not preempted for one before it
                # One token, or the run of tokens that a grammar forced.
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
        if len(self.waiting) and len(self.running) >= self._num_places:
            self._bring_up()
        return batch

    def _mixed_budget(self) -> int:
        """Prompt tokens beside those who decode: the more wait for their first token than for their
        next, the more, so that a crowd that comes at once is not fed in crumbs."""
        num_decoding = len([s for s in self.running if s.state is DECODE])
        num_first = len(self.running) - num_decoding + len(self.waiting)
        wanted = self._settings.mixed_step_tokens * num_first // num_decoding
        return max(self._settings.mixed_step_tokens, min(self._settings.step_tokens, wanted))

    def _most_served(self) -> float:
        """A share that was served more has no prefill in this step, which would make the step long
        for a share that was served less and decodes."""
        if not self._served.several:
            return math.inf
        decoding = (s.share for s in self.running if s.state is DECODE)
        least = min((self._served[share] for share in decoding), default=math.inf)
        return least + self._settings.mixed_step_tokens

    def _admit_spans(self, batch: Batch, budget: int, served: float = math.inf) -> int:
        """Begin waiting sequences, of shares that were served less than `served`, and compute
        their first tokens within the budget; returns how many."""
        added = 0
        for sequence in self._admit(served):
            added += self._add_span(batch, sequence, budget - added)
            if added >= budget:
                break
        return added

    # Running sequences.

    def _add_span(self, batch: Batch, sequence: Sequence, budget: int) -> int:
        """Add the sequence's next tokens, at most about `budget`; returns how many."""
        start, num_tokens = sequence.start, sequence.num_tokens
        end = self._chunk_end(start, num_tokens, budget)
        try:
            self._make_room(batch, sequence, end)
        except OutOfBlocks:
            return 0  # the sequence itself was the one to give way
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
                embedded=self._embedded(sequence, start, end),
                write_kv=end > sequence.num_standing,
            )
        )
        return end - start

    def _chunk_end(self, start: int, num_tokens: int, budget: int) -> int:
        """Where the chunk that begins at `start` ends: at the last token or on a block border."""
        if num_tokens - start <= budget:
            return num_tokens
        border = (start + budget) // self._block_size * self._block_size
        return min(num_tokens, max(border, (start // self._block_size + 1) * self._block_size))

    def _make_room(self, batch: Batch, sequence: Sequence, end: int) -> None:
        """Give slots to the blocks that positions up to `end` are written to.

        Makes others give way, the last admitted first. Raises OutOfBlocks when the sequence
        itself had to, and has gone back to waiting.
        """
        while True:
            try:
                self._provide(sequence, end)
                return
            except OutOfBlocks:
                if self._revoke_ticket():
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
                block = self._tables.own_tail(block, standing % size, sequence.chain)
                blocks[number] = block
                assert block.slot is not None
                table[number] = block.slot
        num_blocks = -(-end // size)
        while len(blocks) < num_blocks:
            blocks.append(self._tables.new_block(sequence.chain))
        while len(table) < num_blocks:
            block = blocks[len(table)]
            table.append(block.slot if block.slot is not None else self._tables.provide(block))

    def _preempt(self, sequence: Sequence) -> None:
        """Send a sequence back to waiting; what it computed stays in the cache while it can."""
        self._leave(sequence)
        sequence.state = WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.put_back(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.left.append(sequence.sequence_id)
        self._tables.release(sequence.chain, sequence.blocks, sequence.num_standing)
        sequence.block_table = []
        sequence.num_standing = 0
        if not sequence.reads_cache:
            sequence.prompt_logprobs.clear()  # computed again, from the beginning

    # Waiting sequences.

    def _admit(self, served: float) -> Iterator[Sequence]:
        """Sequences that begin to run, one by one, of shares that were served less than `served`;
        the caller stops when its budget is spent."""
        if len(self.running) >= self._settings.max_running:
            return  # before anybody is looked up, which is most of a step's work here
        if all(self._served[s.share] >= served for s in self.waiting):
            return
        now_ns = self._clock_ns()
        holders = {s for s in self.waiting if s.ticket is not None and not s.follows}
        for sequence in self.waiting.candidates(now_ns, self._num_cached):
            if len(self.running) >= self._settings.max_running:
                return
            if self._served[sequence.share] >= served or not self._has_place(sequence):
                continue
            if sequence.awaits_images and not self._images_stand(sequence):
                continue
            if sequence.ticket is None:
                if len(holders) >= self._settings.max_tickets and any(
                    holder.share == sequence.share for holder in holders
                ):
                    continue  # a share that holds none may always have one
                sequence.ticket = self._cache.open(sequence.chain, reads=sequence.reads_cache)
            sequence.admitted_ns = sequence.admitted_ns or now_ns
            progress = self._advance(sequence, sequence.ticket)
            if sequence.follows:
                holders.discard(sequence)
                continue
            holders.add(sequence)
            if progress is Progress.LOADING:
                continue
            if progress is Progress.NO_ROOM or not self._has_room(sequence):
                if not self.running and self._revoke_ticket(but=sequence):
                    continue
                return
            tail = self._cache.find_tail(sequence.ticket)
            if tail is not None and tail.case is TailCase.WAIT:
                sequence.follows = True
                holders.discard(sequence)
                continue
            holders.discard(sequence)
            sequence.first_unread = len(sequence.ticket.blocks) * self._block_size
            if not self._images_stand(sequence):
                # It holds nothing while the tower computes, and looks again afterwards.
                self._close_ticket(sequence)
                sequence.state = LOADING
                continue
            self._begin(sequence, tail)
            yield sequence

    def _advance(self, sequence: Sequence, ticket: Ticket) -> Progress:
        progress = self._cache.advance(ticket)
        loading = progress is Progress.LOADING
        sequence.state = LOADING if loading else WAITING
        sequence.follows = progress is Progress.WAITING
        return progress

    def _bring_up(self) -> None:
        """While all places are taken: bring up the prefixes of those who come next, so that their
        turn begins with the KV where it is read. Never where those who run may need the room."""
        self._ahead = [s for s in self._ahead if s.ticket is not None]
        for sequence in self._ahead:
            if sequence.ticket is not None and sequence.state is LOADING:
                self._advance(sequence, sequence.ticket)
        if len(self._ahead) >= min(AHEAD, len(self.waiting)):
            return
        spare = self._num_spare()
        if spare <= 0:
            return  # before anybody is looked up
        for sequence in self.waiting.candidates(self._clock_ns(), self._num_cached)[:AHEAD]:
            fits = sequence.num_tokens // self._block_size < spare
            if sequence in self._ahead or not sequence.reads_cache or not fits:
                continue
            if sequence.ticket is None:
                sequence.ticket = self._cache.open(sequence.chain)
                self._advance(sequence, sequence.ticket)
                spare = self._num_spare()
            self._ahead.append(sequence)

    def _num_spare(self) -> int:
        """Blocks of the device that are left when all who run have taken one more each."""
        growth = sum(len(s.blocks) - len(s.block_table) + 1 for s in self.running)
        return self._cache.num_allocatable - growth

    @property
    def _num_places(self) -> int:
        """How many may run of shares that have some running: other places wait for other shares."""
        limit = self._settings.max_running
        return limit - limit // RESERVED if self._served.several else limit

    def _images_stand(self, sequence: Sequence) -> bool:
        """Whether all images are computed that the cache has not spared; asks for them."""
        if not sequence.request.pictures:
            return True
        assert self._embeddings is not None, "a request with images for a model without"
        # The last token is always computed.
        pictures = unread(sequence.request, min(sequence.first_unread, sequence.num_prompt - 1))
        stand = self._embeddings.want(sequence.sequence_id, sequence.share, pictures)
        sequence.awaits_images = not stand
        return stand

    def _embedded(self, sequence: Sequence, start: int, end: int) -> tuple[Embedded, ...]:
        if self._embeddings is None or not sequence.request.pictures:
            return ()
        return embedded(sequence.request, start, end, self._embeddings)

    def _drop_images(self, sequence: Sequence) -> None:
        if self._embeddings is not None and sequence.request.pictures:
            self._embeddings.drop(sequence.sequence_id)

    def _has_place(self, sequence: Sequence) -> bool:
        """Whether it may run beside those who do: some places wait for shares that have none."""
        if len(self.running) < self._num_places:
            return True
        return all(running.share != sequence.share for running in self.running)

    def _num_cached(self, sequence: Sequence) -> int:
        if sequence.ticket is not None:
            return len(sequence.ticket.blocks) * self._block_size
        return self._cache.peek(sequence.chain) if sequence.reads_cache else 0

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether its blocks, and one to generate into, fit beside those of who runs already."""
        assert sequence.ticket is not None
        needed = sequence.num_tokens // self._block_size + 1 - len(sequence.ticket.blocks)
        promised = sum(len(s.blocks) - len(s.block_table) for s in self.running)
        return needed + promised <= self._cache.num_allocatable

    def _begin(self, sequence: Sequence, tail: Tail | None) -> None:
        """Turn the ticket's blocks into the head of the block table, and plan the rest."""
        ticket = sequence.ticket
        assert ticket is not None
        sequence.ticket = None
        sequence.blocks = list(ticket.blocks)
        num_rows = 0
        if tail is not None:
            block = self._tables.adopt_tail(tail, sequence.chain, len(sequence.blocks))
            if block is not None:
                sequence.blocks.append(block)
                num_rows = tail.num_rows
        sequence.num_standing = len(ticket.blocks) * self._block_size + num_rows
        served = min(sequence.num_standing, sequence.num_prompt - 1)
        sequence.prompt_done = max(sequence.prompt_done, served)
        sequence.block_table = [b.slot for b in sequence.blocks if b.slot is not None]
        if sequence.counts is None:
            source = tail.source if tail is not None and num_rows else None
            counts = count_hits(
                ticket.sources, source, num_rows, sequence.num_prompt, self._block_size
            )
            sequence.counts = counts
            sequence.miss_reasons = miss_reasons(counts, ticket.stop, self._block_size)
            sequence.lookup = self._look_back(sequence, ticket, tail, num_rows)
        sequence.blocks += self._tables.plan(sequence.chain, len(sequence.blocks))
        now_ns = self._clock_ns()
        sequence.loaded_ns = sequence.loaded_ns or now_ns
        sequence.state = PREFILL
        self.waiting.admit(sequence, now_ns)
        self._begin_rate.begun(sequence.work)
        self.running.append(sequence)

    def _look_back(
        self, sequence: Sequence, ticket: Ticket, tail: Tail | None, num_rows: int
    ) -> Lookup:
        """What the cache had of the prompt, and what it knows of the first block it had not."""
        size, num_prompt = self._block_size, sequence.num_prompt
        number = len(ticket.sources)
        runs = runs_of(
            ticket.sources,
            sequence.chain.keys,
            tail_rows=num_rows,
            tail_source=tail.source if tail is not None and num_rows else None,
            num_prompt=num_prompt,
            block_size=size,
        )
        if number * size + num_rows >= num_prompt - 1 or not ticket.reads:
            return Lookup(runs, ticket.stop, size)
        return Lookup(runs, ticket.stop, size, self._cache.explain(sequence.chain, number, tail))

    def _revoke_ticket(self, but: Sequence | None = None) -> bool:
        """Take the pins of the waiting sequence last in line for admission; False: none has any."""
        for sequence in reversed(list(self.waiting)):
            if sequence is not but and sequence.ticket is not None and sequence.ticket.blocks:
                self._close_ticket(sequence)
                return True
        return False

    def _close_ticket(self, sequence: Sequence) -> None:
        """Give back what a waiting sequence holds; it asks again when its turn comes."""
        if sequence.ticket is not None:
            self._cache.close_ticket(sequence.ticket)
            sequence.ticket = None
            sequence.state = WAITING

    # After a step.

    def computed(self, sequence: Sequence, span: Span) -> None:
        """The step computed this span: its KV stands, and the blocks it filled are committed."""
        end = span.start + len(span.tokens)
        self.prompt_tokens_computed += max(0, min(end, sequence.num_prompt) - span.start)
        sequence.prompt_done = max(sequence.prompt_done, min(end, sequence.num_prompt))
        first = sequence.num_standing // self._block_size
        if end <= sequence.num_standing:
            return
        sequence.num_standing = end
        if end >= sequence.num_prompt:
            self._drop_images(sequence)
        for number in range(first, end // self._block_size):
            block = self._tables.commit(sequence.chain, number, sequence.blocks[number])
            sequence.blocks[number] = block
            assert block.slot is not None
            sequence.block_table[number] = block.slot
        if end % self._block_size and end == sequence.num_tokens:
            self._tables.computed_tail(sequence.blocks[end // self._block_size])

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        """Let `twin` run on from the tokens of `sequence`, sharing the blocks of its KV."""
        standing = sequence.num_standing
        if self._cache.layout.has_states:
            # Only one sequence can continue the last block's state: the twin computes it again.
            standing -= standing % self._block_size
        num_blocks = -(-standing // self._block_size)
        twin.blocks = self._tables.share(sequence.blocks[:num_blocks])
        twin.block_table = sequence.block_table[:num_blocks]
        twin.num_standing, twin.prompt_done = standing, sequence.num_standing
        twin.counts, twin.miss_reasons = sequence.counts, sequence.miss_reasons
        twin.lookup = sequence.lookup
        twin.queued_ns, twin.loaded_ns = sequence.queued_ns, sequence.loaded_ns
        twin.admitted_ns = sequence.admitted_ns
        twin.state = PREFILL
        self._served.enter(twin.share)
        self.running.append(twin)
