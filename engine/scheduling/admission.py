"""Decides which waiting sequences begin to run, and on which blocks: tickets, room and places.

Engine thread only. A ticket promotes a prefix. Once it is ready, and its blocks and one to generate
into fit, they become the head of the sequence's block table.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from engine.request import Lookup
from engine.scheduling.lookup import computed_otherwise, count_hits, miss_reasons, runs_of
from engine.scheduling.queue import WaitingQueue
from engine.scheduling.sequence import LOADING, PREFILL, WAITING, Sequence
from engine.scheduling.settings import SchedulerSettings
from engine.scheduling.shares import BeginRate, ServedShares, owner_of
from engine.scheduling.states import StatePlans
from tiers.cache import TieredCache
from tiers.errors import MissReason
from tiers.memory.tails import Tail, TailCase
from tiers.transfer.ticket import Progress, Ticket

AHEAD = 2  # waiting requests whose prefix is promoted while all places are taken
RESERVED = 8  # one in this many places is kept for shares that have nothing running


class Admission:
    """Owns the waiting sequences and their tickets. A sequence that begins is added to `running`,
    the scheduler's list."""

    def __init__(
        self,
        cache: TieredCache,
        settings: SchedulerSettings,
        clock_ns: Callable[[], int],
        served: ServedShares,
        running: list[Sequence],
        states: StatePlans | None = None,
    ) -> None:
        self._cache = cache
        self._tables = cache.tables
        self._block_size = cache.layout.block_size
        self._settings = settings
        self._clock_ns = clock_ns
        self._served = served
        self._running = running
        self._states = states
        self.waiting = WaitingQueue(max_passed_s=settings.max_passed_s, served=served)
        self.begin_rate = BeginRate()
        self._ahead: list[Sequence] = []  # promoted while all places are taken

    def begin(self, served: float) -> Iterator[Sequence]:
        """Yield sequences that begin to run, from shares that were served less than `served`. The
        caller stops when its budget is spent."""
        if len(self._running) >= self._settings.max_running:
            return  # before any lookup, which is most of a step's work here
        if all(self._served[s.share] >= served for s in self.waiting):
            return
        now_ns = self._clock_ns()
        holders = {s for s in self.waiting if s.ticket is not None and not s.follows}
        for sequence in self.waiting.candidates(now_ns, self.num_cached):
            if len(self._running) >= self._settings.max_running:
                return
            if self._served[sequence.share] >= served or not self._has_place(sequence):
                continue
            if sequence.ticket is None:
                if len(holders) >= self._settings.max_tickets and any(
                    owner_of(holder.share) == owner_of(sequence.share) for holder in holders
                ):
                    continue  # an owner that holds none may always take one
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
                if not self._running and self.revoke_ticket(but=sequence):
                    continue
                return
            tail = self._cache.find_tail(sequence.ticket)
            if tail is not None and tail.case is TailCase.WAIT:
                sequence.follows = True
                holders.discard(sequence)
                continue
            holders.discard(sequence)
            self._begin(sequence, tail)
            yield sequence

    def _advance(self, sequence: Sequence, ticket: Ticket) -> Progress:
        progress = self._cache.advance(ticket)
        loading = progress is Progress.LOADING
        sequence.state = LOADING if loading else WAITING
        sequence.follows = progress is Progress.WAITING
        return progress

    def bring_up(self) -> None:
        """Promote the prefixes of the next sequences while all places are taken, so that their KV
        is on the device when they begin. Never uses room that running sequences may need."""
        self._ahead = [s for s in self._ahead if s.ticket is not None]
        for sequence in self._ahead:
            if sequence.ticket is not None and sequence.state is LOADING:
                self._advance(sequence, sequence.ticket)
        if len(self._ahead) >= min(AHEAD, len(self.waiting)):
            return
        spare = self._num_spare()
        if spare <= 0:
            return  # before any lookup
        for sequence in self.waiting.candidates(self._clock_ns(), self.num_cached)[:AHEAD]:
            fits = sequence.num_tokens // self._block_size < spare
            if sequence in self._ahead or not sequence.reads_cache or not fits:
                continue
            if sequence.ticket is None:
                sequence.ticket = self._cache.open(sequence.chain)
                self._advance(sequence, sequence.ticket)
                spare = self._num_spare()
            self._ahead.append(sequence)

    def _num_spare(self) -> int:
        """Device blocks left after every running sequence has taken one more."""
        growth = sum(len(s.blocks) - len(s.block_table) + 1 for s in self._running)
        return self._cache.num_allocatable - growth

    @property
    def num_places(self) -> int:
        """How many sequences may run of owners that already run some. Other places are kept for
        other owners."""
        limit = self._settings.max_running
        return limit - limit // RESERVED if self._served.several else limit

    def _has_place(self, sequence: Sequence) -> bool:
        """Whether a place is free for it. Some places are kept for owners that have none."""
        if len(self._running) < self.num_places:
            return True
        owner = owner_of(sequence.share)
        return all(owner_of(running.share) != owner for running in self._running)

    def num_cached(self, sequence: Sequence) -> int:
        if sequence.ticket is not None:
            return len(sequence.ticket.blocks) * self._block_size
        return self._cache.peek(sequence.chain) if sequence.reads_cache else 0

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether its blocks, and one to generate into, fit beside those of the running
        sequences."""
        assert sequence.ticket is not None
        needed = sequence.num_tokens // self._block_size + 1 - len(sequence.ticket.blocks)
        promised = sum(len(s.blocks) - len(s.block_table) for s in self._running)
        return needed + promised <= self._cache.num_allocatable

    def _begin(self, sequence: Sequence, tail: Tail | None) -> None:
        """Turn the ticket's blocks into the head of the block table, and plan the rest."""
        ticket = sequence.ticket
        assert ticket is not None
        sequence.ticket = None
        sequence.blocks = list(ticket.blocks)
        if self._states is not None:
            self._states.begin(sequence, ticket)
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
            self._count(sequence, ticket, tail, num_rows)
        sequence.blocks += self._tables.plan(sequence.chain, len(sequence.blocks))
        now_ns = self._clock_ns()
        sequence.loaded_ns = sequence.loaded_ns or now_ns
        sequence.state = PREFILL
        self.waiting.admit(sequence, now_ns)
        self.begin_rate.begun(sequence.share, sequence.work)
        self._running.append(sequence)

    def _count(self, sequence: Sequence, ticket: Ticket, tail: Tail | None, num_rows: int) -> None:
        """Fix the hits and misses of a prompt that begins to run."""
        size = self._block_size
        source = tail.source if tail is not None and num_rows else None
        counts = count_hits(ticket.sources, source, num_rows, sequence.num_prompt, size)
        sequence.counts = counts
        stop = self._stop_of(sequence, ticket)
        sequence.miss_reasons = miss_reasons(counts, stop, size)
        lookup = self._look_back(sequence, ticket, tail, num_rows)
        sequence.lookup = replace(lookup, stop=stop)

    def _stop_of(self, sequence: Sequence, ticket: Ticket) -> MissReason:
        """Why the ticket's run ended. A prompt of which nothing is held may be on disk all the
        same, computed by another processor or version."""
        others, disk = self._settings.other_arithmetics, self._cache.disk
        if ticket.stop is not MissReason.ABSENT or ticket.sources or not others or disk is None:
            return ticket.stop
        ids = computed_otherwise(sequence.chain, sequence.request.scope, others)
        nearest = disk.levels()[0]  # a store below it may take a second to answer
        held = any(nearest.probe([first]) for first in ids)
        return MissReason.ARITHMETIC if held else ticket.stop

    def _look_back(
        self, sequence: Sequence, ticket: Ticket, tail: Tail | None, num_rows: int
    ) -> Lookup:
        """Record what the cache had of the prompt, and what it knows about the first missed
        block."""
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

    def revoke_ticket(self, but: Sequence | None = None) -> bool:
        """Take the pins of the waiting sequence that is last in line. False if none has any."""
        for sequence in reversed(list(self.waiting)):
            if sequence is not but and sequence.ticket is not None and sequence.ticket.blocks:
                self.close_ticket(sequence)
                return True
        return False

    def close_ticket(self, sequence: Sequence) -> None:
        """Release what a waiting sequence holds. It asks again when its turn comes."""
        if sequence.ticket is not None:
            self._cache.close_ticket(sequence.ticket)
            sequence.ticket = None
            sequence.state = WAITING
