"""An engine in simulated time, driven turn by turn, and the oracle of what it may answer.

The model is `ChainRunner`, whose KV proves the prefix it was computed from; the disk is in memory
and slow and faulty by a seed; copies between device and host arrive late. `World.turn` holds after
every turn that each pin has its owner, that what is announced is being computed, and that nobody
waits for what nobody does. `tests.sim.life` draws what happens in it.
"""

import random
from collections import Counter
from functools import partial

from engine.bounds import check_params
from engine.engine import Engine
from engine.request import FinishReason, SamplingParams
from engine.scheduling.group import seed_of
from engine.scheduling.sequence import SequenceState
from engine.scheduling.settings import SchedulerSettings
from engine.settings import EngineSettings
from tests.sim.random_grammar import EOS
from tests.sim.watched import ADAPTERS, BLOCK, VOCAB_SIZE, LateCopies, Watched
from tests.support.caches import cache_of
from tests.support.chain_runner import advance, before, chain_layout, content_at, replay
from tests.support.memory_tier import MemoryTier, SteppedMover
from tests.support.requests import request
from tiers.blocks.keys import CacheScope
from tiers.memory.block import BlockState
from tiers.policy.admission import WritePolicy
from tiers.policy.quota import QuotaShares
from tiers.telemetry.events import CacheEvent, EventKind
from tiers.tier import TierName

MAX_IDLE = 5  # turns in a row in which nothing moves, and somebody waits
CUT = (FinishReason.ABORT, FinishReason.ERROR, FinishReason.UNMATCHED)
SAMPLED = ("n", "seed", "prompt_logprobs")
PLACEHOLDER = 49  # the token that stands for a picture
PICTURES = (b"a cat" * 4, b"a dog" * 4)


class World:
    """An engine without a thread, driven step by step, and what it has answered."""

    def __init__(
        self,
        *,
        device_blocks=24,
        host_blocks=32,
        disk_blocks=200,
        fault_rate=0.0,
        seed=0,
        share_tails=True,
        write_policy=WritePolicy.ON_EVICT,
        max_running=6,
        step_tokens=16,
        jump_forward=True,
        host_moves=False,
        quotas=None,
        late_copies=False,
        window=None,
        windowed=1,
        window_loss=0.0,
        tier=None,
    ):
        """`quotas` are parts of every tier, by scope; with a `window` a second layer has it,
        or `windowed` ones. `tier`: a disk that another world has left."""
        layout = chain_layout(BLOCK, window, windowed=windowed)
        self.now_s = 1_000_000.0
        shares = None
        if quotas is not None:
            shares = QuotaShares(10**6, {root: int(1e6 * part) for root, part in quotas.items()})
        tier = tier or MemoryTier(
            disk_blocks,
            seed=seed,
            block_bytes=layout.nbytes,
            lasting_bytes=layout.lasting_nbytes,
            shares=shares,
            window_loss=window_loss,
        )
        tier.fault_rate = fault_rate
        self.tier = tier
        self.mover = SteppedMover(tier, seed=seed, late_rate=0.3 * late_copies)
        self.cache = cache_of(
            *(layout, device_blocks, host_blocks),
            share_tails=share_tails,
            write_policy=write_policy,
            disk=tier,
            mover=self.mover,
            shares=shares,
            wall_clock=lambda: self.now_s,
        )
        self.cache.residency.host_moves = host_moves
        if late_copies:
            LateCopies(self.cache.pool, random.Random(seed))
        self.events = self.cache.stream.subscribe(capacity=1_000_000)
        self.told = set()
        self.runner = Watched(self.cache, lambda number: self.engine._answers.sequences[number])
        scheduler = SchedulerSettings(
            max_running=max_running, step_tokens=step_tokens, mixed_step_tokens=step_tokens // 2
        )
        settings = EngineSettings(
            scheduler=scheduler,
            eos_token_ids=frozenset({EOS}),
            jump_forward=jump_forward,
            adapters=ADAPTERS,
            check_params=partial(check_params, vocab_size=VOCAB_SIZE),
        )
        self.engine = Engine(self.runner, self.cache, settings, self._take)
        self.outputs = {}
        self.requests = {}
        self.num_turns = 0
        self.disk_loses = False  # blocks, and tells nobody
        self.turns = {}  # how many each request has taken so far
        self.poor = set()  # those whose money ran out
        self._idle = 0

    def submit(
        self, name, prompt, max_tokens=4, *, tenant=b"", adapter=None, sampling=None, **fields
    ):
        """`sampling` are further parameters, and so are those of `fields` that a request has not;
        what the engine refuses leaves nothing behind."""
        params = {"temperature": 0, "max_tokens": max_tokens}
        params |= {name: fields.pop(name) for name in SAMPLED if name in fields}
        digest = ADAPTERS[adapter] if adapter is not None else b""
        fields |= {"scope": CacheScope(tenant=tenant, adapter=digest), "adapter": adapter}
        params = SamplingParams(**{**params, **(sampling or {})})
        asked = request(prompt, name, params=params, **fields)
        self.engine.submit(asked)
        self.requests[name] = asked
        self.outputs[name] = []
        self.turns[name] = 0

    def run_out(self, name):
        """A request's money runs out, so that its sequences end one by one, begun or not."""
        self.poor.add(name)
        for index in range(self.requests[name].params.n):
            self.engine.abort(name, FinishReason.LENGTH, index)

    def live(self):
        return [name for name, outputs in self.outputs.items() if not _ended(outputs)]

    def turn(self):
        """One turn of the engine; whether it computed anything."""
        computed = self.engine.turn()
        if self.runner.wrong is not None:
            raise self.runner.wrong
        live = self.live()
        for name in live:
            self.turns[name] += 1
        self._idle = 0 if computed or not live or self.mover.num_jobs else self._idle + 1
        assert self._idle < MAX_IDLE, f"{live} wait for ever"
        self.check_claims()
        return computed

    def step(self):
        """One turn, with every job of the disk done before it."""
        self.mover.run(100)
        self.turn()

    def phase(self, name):
        """Where a live request is on its way."""
        group = self.engine._answers.groups.get(name)
        if group is None:
            return "sent"
        sequence = group.sequences[0]
        if sequence.follows:
            return "follows"
        return str(sequence.state)

    def run(self, max_turns=5000):
        """Step until every request has ended."""
        turns = 0
        while self.live():
            turns += 1
            assert turns < max_turns, f"stuck: {self.live()} {self.engine.stats()}"
            if not self.turn():
                self.mover.run(2)

    def tokens(self, name, index=0):
        return [t for o in self.outputs[name] if o.index == index for t in o.tokens]

    def counts(self, name):
        return self.outputs[name][-1].counts

    def ask(self, name, prompt, **asked):
        """Submit a request, run until every one has ended, and give its counts."""
        self.submit(name, prompt, **asked)
        self.run()
        return self.counts(name)

    def check(self):
        """Run to the end. Every request got a cold run's tokens, or a beginning of them if it was
        aborted, and nothing is left."""
        self.run()
        for name, outputs in self.outputs.items():
            for index in range(self.requests[name].params.n):
                expected = self._cold(self.requests[name], index)
                got = self.tokens(name, index)
                reason = next((o.finish for o in outputs if o.index == index and o.finish), None)
                faulty = name in self.runner.mad or name in self.runner.poisoned
                assert faulty or reason is not FinishReason.ERROR, name
                cut = name in self.poor or reason in (FinishReason.ABORT, FinishReason.ERROR, None)
                if cut:
                    assert got == expected[: len(got)], name
                else:
                    stopped = bool(expected) and expected[-1] == EOS
                    assert reason is (FinishReason.STOP if stopped else FinishReason.LENGTH), name
                    assert got == expected, name
            self._check_prompt_logprobs(name)
            counts = outputs[-1].counts
            whole = outputs[-1].finish not in CUT and name not in self.poor
            if whole or any(output.tokens for output in outputs):
                assert counts.prompt == len(self.requests[name].tokens)
            mad = name in self.runner.mad  # its last span is computed, and not believed
            if not self.engine.stats().num_preemptions and not mad:
                computed = self.runner.prompt_tokens[name]  # more where a tail cannot be copied
                assert counts.miss == computed or self.runner.copies_fail, (name, counts, computed)
                assert counts.miss <= computed, name
            billed = {o.counts.with_output(0) for o in outputs if o.tokens}
            assert len(billed) <= 1, "hits and misses changed after the first admission"
            assert sum(outputs[0].miss_reasons.values()) in (0, outputs[0].counts.miss)
            if name not in self.poor:
                _check_lookup(outputs[0])
            for index in range(self.requests[name].params.n):
                _check_times([output for output in outputs if output.index == index])
        self.check_idle()

    def _check_prompt_logprobs(self, name):
        """They are told once, of every prompt token but the first, from the true prefix."""
        told = [one for output in self.outputs[name] for one in output.prompt_logprobs]
        request = self.requests[name]
        if request.params.prompt_logprobs is None:
            assert not told
            return
        prompt, values = request.tokens, [before(request.scope.adapter)]
        for position, token in enumerate(prompt[:-1]):
            values.append(advance(values[-1], token, content_at(request.contents, position)))
        expected = list(zip(prompt[1:], values[1:], strict=True))
        got = [(one.token, one.logprob) for one in told]
        if self.outputs[name][-1].finish in CUT or name in self.poor:
            assert got == expected[: len(got)]
        else:
            assert got == expected
        assert self.outputs[name][-1].counts.hit == 0

    def _cold(self, request, index):
        """The tokens of a cold, lone run."""
        params = request.params
        seed = params.seed
        if index and seed is not None:
            seed = seed_of(seed, index)
        grammar = request.grammar
        room = self.engine.max_tokens - len(request.tokens)
        return replay(
            request.tokens,
            min(params.max_tokens or 0, room),
            seed=seed,
            grammar=grammar.begin(0) if grammar else None,
            end=EOS,
            adapter=request.scope.adapter,
            contents=request.contents,
        )

    def settle(self):
        """Let everything under way end."""
        self.cache.step()
        while self.cache.is_moving or self.cache.residency.copies:
            self.mover.run(1000)
            self.cache.step()

    def sink(self):
        """Run to the end, and leave everything on the disk alone."""
        residency = self.cache.residency
        self.run()
        self.settle()
        for block in [*self.cache.index, *self.cache.index.iter_partials()]:
            if block.slot is not None:
                residency.evict_device(block)
        self.settle()
        for block in [*self.cache.index]:
            if block.frame is not None:
                residency.evict_host(block)

    def stands(self, keys):
        """Whether the KV of each block is in any tier."""
        blocks = [self.cache.index.get(key) for key in keys]
        above = [block is not None and block.state is BlockState.READY for block in blocks]
        return [a or b for a, b in zip(above, self.tier.held(keys), strict=True)]

    def check_claims(self):
        """Pins are those of tickets and sequences, and each announced block has who makes it."""
        scheduler = self.engine._scheduler
        pins = Counter()
        writers = set()
        for sequence in scheduler.running:
            pins.update(sequence.blocks)
            writers.add(sequence.chain)
        for sequence in scheduler.waiting:
            ticket = sequence.ticket
            if ticket is not None:
                pins.update(ticket.blocks)
            if sequence.state is SequenceState.LOADING:
                assert ticket.probe or ticket.is_loading or self.cache.layout.reach  # it may mend
        loading = {block for _, blocks, _ in self.cache._promoter._loads for block in blocks}
        for block in self._blocks():
            assert block.ref_count == pins[block], f"{block} has {pins[block]} owners"
            if block.state is BlockState.COMPUTING:
                assert block.writer in writers, f"nobody computes {block}"
            assert block.state is not BlockState.LOADING or block in loading, block

    def _blocks(self):
        return [*self.cache.index, *self.cache.index.iter_partials()]

    def check_idle(self):
        """Nothing is in use, slots and frames are conserved, and nothing moves any more."""
        self.settle()
        assert not self.engine._scheduler.running
        assert not len(self.engine._scheduler.waiting)
        for block in self._blocks():
            assert block.ref_count == 0 and block.busy == 0, block
        assert not self.engine._answers.groups and not self.engine._answers.sequences
        assert not self.engine._intake._in_flight and not self.runner._begun
        self.cache.residency.check()
        below = [block.key for block in self.cache.index if block.held_below and block.key]
        held = self.disk_loses or all(self.tier.held(below))
        assert held, "memory believes a block to be below that is not"
        self.check_events()

    def check_still(self):
        """Once pins and ages have run out, an engine that nobody asks does nothing."""
        for _ in range(20):
            self.now_s += 100
            self.step()
        self.settle()
        before = self.engine.stats()
        for _ in range(20):
            self.now_s += 100
            assert not self.turn() and not self.mover.num_jobs
        assert before == self.engine.stats()
        self.check_idle()

    def check_events(self):
        """Who applies the events knows exactly what stands where."""
        for event in self.events.take():
            place = (event.tier, event.key)
            if event.kind is EventKind.REMOVED:
                self.told.remove(place)
            else:
                assert place not in self.told, f"{event} was there already"
                self.told.add(place)
        stands = {(TierName.DEVICE, b.key) for b in self.cache.index if b.slot is not None}
        stands |= {(TierName.HOST, b.key) for b in self.cache.index if b.frame is not None}
        assert stands == self.told
        if not self.cache.settings.share_tails:  # what is partly filled leaves, and never came
            self._check_counters(Counter(tier for tier, _ in stands))

    def _check_counters(self, stands):
        """What came and has not left stands there, by the counters too."""
        events = self.cache.residency.counters.events
        for tier in (TierName.DEVICE, TierName.HOST):
            left = events[tier, CacheEvent.EVICTED] + events[tier, CacheEvent.PURGED]
            assert stands[tier] == events[tier, CacheEvent.STORED] - left, tier

    def _take(self, outputs):
        for output in outputs:
            self.outputs[output.request_id].append(output)


def _check_lookup(told):
    """The runs lie end to end and sum to the counts, class by class."""
    if told.lookup is None or told.finish in CUT:
        return
    place, by_source = 0, dict.fromkeys([*TierName, None], 0)
    for run in told.lookup.runs:
        assert run.start == place and run.num_tokens > 0, told.lookup
        place += run.num_tokens
        by_source[run.source] += run.num_tokens
    counts = told.counts
    assert place == counts.prompt and by_source[None] == counts.miss
    assert by_source[TierName.DEVICE] == counts.hit_device
    assert by_source[TierName.HOST] == counts.hit_host
    assert by_source[TierName.DISK] == counts.hit_disk


def _check_times(outputs):
    """A sequence's moments come in order, and none that was told moves; 0 is not reached."""
    told = []
    for output in outputs:
        at = output.timeline
        begun = [at.arrival_ns, at.admitted_ns, at.loaded_ns, at.first_token_ns]
        assert told == begun[: len(told)], "a moment that was told has moved"
        told = [moment for moment in begun if moment]
        assert told and told == begun[: len(told)]
        assert sorted([*told, at.last_token_ns]) == [*told, at.last_token_ns]


def _ended(outputs):
    return bool(outputs) and outputs[-1].last
