"""Whatever parts of a prefix leave, and whenever, a model with recurrent states answers as cold.

The model is `ChainRunner` with a state beside its KV, both of which prove the prefix that they were
computed from. Blocks and checkpoints are evicted one by one, from each tier on its own. With a
window, a block may also lack that part of its KV, and the runner reads all that the window sees.
"""

import random
from dataclasses import replace

import pytest
import torch

from engine.attention.recurrent import Piece, RecurrentStates, StateName, state_views
from engine.engine import Engine
from engine.request import FinishReason, SamplingParams
from engine.scheduling.settings import SchedulerSettings
from engine.settings import EngineSettings
from tests.support.chain_runner import SEED, ChainRunner, WrongKv, advance, chain_layout, replay
from tests.support.memory_tier import MemoryTier, SteppedMover
from tests.support.requests import request
from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope
from tiers.blocks.layout import StateTensor
from tiers.cache import CacheSettings, TieredCache
from tiers.policy.checkpoints import keeps_stop, positions, prompt_end, worth_blocks

BLOCK = 4
STATE = StateName(0, "recurrent", 0)
STATES = (StateTensor(*STATE, (1,), "float32"),)
LAYOUT = replace(chain_layout(BLOCK), states=STATES)
SCOPE = CacheScope(layout=LAYOUT.digest())
WINDOW = 6  # tokens: two blocks


class StatefulRunner(ChainRunner):
    """Reads a sequence's last KV from its state too. `failing` steps fail at their end."""

    def __init__(self, pool, checkpoints, window):
        super().__init__(pool)
        self._window = window or 1
        self._slots = checkpoints
        self._states = RecurrentStates(BLOCK)
        self.failing = 0

    def step(self, batch):
        spans = batch.spans
        self._states.begin([Piece(s.sequence_id, s.start, len(s.tokens)) for s in spans])
        tokens = [int(token) for span in spans for token in span.tokens]
        self._states.compute(self._advance, torch.tensor(tokens)[None, :, None])
        if self.failing:
            self.failing -= 1
            raise RuntimeError("a step fails")
        for span in spans:
            before = self._states.at(span.sequence_id, span.start)
            value = int(before[STATE].view(torch.int32)) if span.start else SEED
            if span.start and value != self._read(span, span.start - 1):
                raise WrongKv(f"the state of sequence {span.sequence_id} at {span.start}")
            for position in range(max(0, span.start + 1 - self._window), span.start):
                self._read(span, position)
        sampled = super().step(batch)
        self._states.finish()
        return sampled

    def _advance(self, rows, cache):
        before = cache.get_recurrent_state(0)
        values = [SEED] * len(rows) if before is None else before.view(torch.int32)[:, 0].tolist()
        for tokens in rows[:, :, 0].t().tolist():
            values = [advance(v, token) for v, token in zip(values, tokens, strict=True)]
        after = torch.tensor(values, dtype=torch.int32)[:, None].view(torch.float32)
        cache.update_recurrent_state(after, 0)
        return rows

    def forget(self, sequence_id):
        super().forget(sequence_id)
        self._states.forget(sequence_id)

    def fork(self, sequence_id, twin_id):
        self._states.fork(sequence_id, twin_id)

    def holds(self, sequence_id, position):
        return self._states.holds(sequence_id, position)

    def save(self, sequence_id, position, slot):
        view = state_views(self._slots[slot], LAYOUT.states)[STATE]
        view.copy_(self._states.at(sequence_id, position)[STATE])

    def resume(self, sequence_id, position, slot):
        view = state_views(self._slots[slot], LAYOUT.states)[STATE]
        self._states.put(sequence_id, position, {STATE: view.clone()})


class World:
    """An engine driven turn by turn over tiers in memory, which outlive it."""

    def __init__(self, seed, device_blocks, slots, fault_rate, below=300, window=None):
        self.chance = random.Random(seed)
        self.window = window
        self.layout = replace(chain_layout(BLOCK, window), states=STATES)
        self._device_blocks, self._slots = device_blocks, slots
        self.tiers = [
            MemoryTier(
                most,
                fault_rate=fault_rate,
                seed=seed,
                block_bytes=layout.nbytes,
                lasting_bytes=layout.lasting_nbytes,
                window_loss=0.2 if layout.apart else 0.0,
            )
            for most, layout in ((300, self.layout), (below, self.layout.checkpoint))
            if below
        ]
        self.asked = {}
        self.answers = {}
        self.ended = {}
        self.hits = 0
        self.uncounted = 0  # requests whose hits and misses are not their prompt
        self.open()

    def open(self):
        """Start an engine over the tiers, with empty memory."""
        layout = self.layout
        states = self._slots * layout.checkpoint.nbytes
        device = self._device_blocks * layout.nbytes + states
        host = 40 * layout.nbytes if self.tiers else 0
        self.movers = [SteppedMover(tier, seed=1) for tier in self.tiers]
        names = ("disk", "checkpoint_disk", "mover", "checkpoint_mover")
        below = dict(zip(names, (*self.tiers, *self.movers), strict=False))
        sizes = {"device_bytes": device, "host_bytes": host, "checkpoint_share": states / device}
        self.cache = TieredCache(layout, CacheSettings(**sizes, weigh_loads=False), **below)
        self.groups = [self.cache, self.cache.group]
        states_pool = self.cache.group.pool.tensor
        self.runner = StatefulRunner(self.cache.pool.tensor, states_pool, self.window)
        scheduler = SchedulerSettings(max_running=4, step_tokens=12, mixed_step_tokens=6)
        self.engine = Engine(
            self.runner, self.cache, EngineSettings(scheduler=scheduler), self._take
        )

    def submit(self, prompt, max_tokens, n, keeps=()):
        name = str(len(self.asked))
        self.asked[name] = list(prompt), max_tokens, n
        self.answers[name] = {index: [] for index in range(n)}
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, n=n)
        self.engine.submit(request(prompt, name, params=params, scope=SCOPE, keeps=keeps))

    def purge(self):
        return self.cache.operations.purge([SCOPE.root()])

    def purge_all(self):
        """While requests run, which end exactly and leave nothing in either group."""
        self.turn()
        purged = self.purge()
        for _ in range(200):
            if purged.done():
                break
            self.turn()
        assert 0 == purged.result(0).num_left
        self.finish()
        assert not self.cache.operations.blocked
        assert [0, 0] == [len(group.index) for group in self.groups]
        assert [0, 0] == [tier.stats().num_blocks for tier in self.tiers]

    def _take(self, outputs):
        for output in outputs:
            self.answers[output.request_id][output.index] += output.tokens
            if output.last:
                self.ended[output.request_id] = output.finish
                counts, (prompt, _, _) = output.counts, self.asked[output.request_id]
                if output.finish is not FinishReason.ABORT:
                    self.uncounted += len(prompt) != counts.hit + counts.miss
                self.hits += output.counts.hit

    def turn(self):
        self.engine.turn()
        for mover in self.movers:
            mover.run(self.chance.randrange(4))

    def finish(self):
        """Run until every request has ended, and compare what it got."""
        for _ in range(3000):
            if len(self.ended) == len(self.asked):
                break
            self.turn()
        assert len(self.ended) == len(self.asked)
        assert 0 == self.uncounted
        assert FinishReason.ERROR not in self.ended.values()  # as it is after WrongKv
        self.engine.turn()
        for name, (prompt, max_tokens, _) in self.asked.items():
            expected = replay(prompt, max_tokens)
            for tokens in self.answers[name].values():
                whole = self.ended[name] is FinishReason.LENGTH
                assert expected == tokens if whole else expected[: len(tokens)] == tokens
        for group in self.groups:
            group.residency.check()
            assert all(block.ref_count == 0 for block in group.index)

    def restart(self):
        self.finish()
        self.cache.flush(0)
        for mover in self.movers:
            mover.run(1000)
        self.engine.turn()
        self.open()

    def evict(self, group, tier, number):
        """Take one part from one tier, if nobody needs it."""
        cache = self.groups[group]
        if tier == "disk":
            keys = list(self.tiers[group]._blocks)
            if keys:
                self.tiers[group].discard([keys[number % len(keys)]])
            return
        blocks = [b for b in cache.index if not b.ref_count and not b.busy]
        blocks = [b for b in blocks if (b.slot if tier == "device" else b.frame) is not None]
        if blocks:
            block = blocks[number % len(blocks)]
            if tier == "device":
                cache.residency.evict_device(block)
            else:
                cache.residency.evict_host(block)


@pytest.mark.parametrize(("keeps", "hits"), [((), 0), ((13,), 12), ((3,), 0), ((99,), 0)])
def test_a_prefix_that_is_asked_to_be_kept_hits_at_its_second_sight(keeps, hits):
    world = World(1, device_blocks=60, slots=12, fault_rate=0.0)
    world.submit(list(range(21)), 1, 1, keeps)
    world.finish()
    world.submit([*range(14), 49, 48, 47], 1, 1)
    world.finish()
    assert hits == world.hits


@pytest.mark.parametrize("pinned", [False, True])
def test_a_pin_keeps_the_checkpoint_of_its_prefix(pinned):
    world = World(1, device_blocks=26, slots=5, fault_rate=0.0, below=8)
    operations, states = world.cache.operations, world.groups[1].operations
    prompt = list(range(40))
    world.submit(prompt, 2, 1)
    world.finish()
    if pinned:
        chain = Chain(SCOPE.root(), prompt, BLOCK)
        operations.pin("mine", chain, operations.now_s + 3600)
    for number in range(12):
        world.submit([number, *range(20)], 2, 1)
        world.finish()
    before = world.hits
    world.submit(prompt, 2, 1)
    world.finish()
    assert (36 if pinned else 0) == world.hits - before
    assert [pin.name for pin in operations.pins()] == [pin.name for pin in states.pins()]
    assert pinned == operations.unpin("mine")
    assert [] == states.pins()


def test_a_scope_stays_closed_until_its_checkpoints_are_purged_too():
    world = World(1, device_blocks=26, slots=5, fault_rate=0.0)
    root = SCOPE.root()
    world.submit(list(range(20)), 2, 1)
    world.finish()
    purged = world.purge()
    for mover in world.movers:
        assert not purged.done() and root in world.cache.operations.blocked
        mover.run(10)
        world.engine.turn()
    assert 0 == purged.result(0).num_left
    assert root not in world.cache.operations.blocked


class Replay:
    """Blocks and checkpoints, each kind under LRU in its own room. Checkpoints are taken where the
    server's rule says."""

    def __init__(self, device_blocks, slots):
        self._device_blocks, self._slots = device_blocks, slots
        self._blocks = {}  # the oldest first
        self._states = {}
        self._worth = worth_blocks(LAYOUT.checkpoint.nbytes, LAYOUT.nbytes)

    def serve(self, keys, num_tokens):
        """Tokens of the prompt that hit. `keys` are of its blocks and of those of its answer."""
        full, end = num_tokens // BLOCK, prompt_end(num_tokens, BLOCK)
        held = next((n for n in range(full) if keys[n] not in self._blocks), full)
        longest = range(min(held, end), 0, -1)
        start = next((n for n in longest if keys[n - 1] in self._states), 0)
        taken = positions(start, num_tokens, BLOCK, worth=self._worth, parts=held)
        if keeps_stop(len(keys), num_tokens, BLOCK, worth=self._worth):
            taken.add(len(keys))
        for number in range(len(keys), 0, -1):  # a prefix is younger than what continues it
            for order in (self._blocks, self._states):
                if order is self._blocks or number in taken or number == start:
                    order.pop(keys[number - 1], None)
                    order[keys[number - 1]] = None
        for order, room in ((self._blocks, self._device_blocks), (self._states, self._slots)):
            while len(order) > room:
                del order[next(iter(order))]
        return start * BLOCK


def test_served_and_replayed_hits_agree():
    """Conversations over memory alone."""
    chance, device, slots = random.Random(5), 100, 20
    world = World(1, device, slots, fault_rate=0.0, below=0)
    talks = [TRUNKS[number % 3][: 20 + number] for number in range(12)]
    model, replayed, total = Replay(device, slots), 0, 0
    for number in range(300):
        at = min(int(chance.expovariate(0.3)), len(talks) - 1)  # some go on more often
        tokens, max_tokens = [*talks[at], number % 50], 1 + chance.randrange(9)
        world.submit(tokens, max_tokens, 1)
        world.finish()
        whole = [*tokens, *world.answers[str(number)][0]]
        keys = Chain(CacheScope().root(), whole[:-1], BLOCK).keys
        replayed += model.serve(keys, len(tokens))
        total += len(tokens)
        talks[at] = whole if len(whole) < 150 else TRUNKS[number % 3][:20]
    assert 0.2 < replayed / total < 0.8
    assert replayed / total == pytest.approx(world.hits / total, abs=0.02)


TRUNKS = [[(7 * i * i + 5 * t + i) % 50 for i in range(60)] for t in range(3)]


def ask_on(world, chance):
    """A prompt that begins as others do, or the next turn of an answered one, or that one again."""
    ended = [name for name, why in world.ended.items() if why is FinishReason.LENGTH]
    if ended and chance.random() < 0.4:
        name = chance.choice(ended)
        prompt, max_tokens, _ = world.asked[name]
        if len(prompt) < 70:
            more = world.answers[name][0] + [chance.randrange(50)] if chance.random() < 0.7 else []
            return world.submit(prompt + more, max_tokens, 1)
    trunk = TRUNKS[chance.randrange(3)][: chance.randrange(46)]
    own = [chance.randrange(50) for _ in range(chance.randint(1, 9))]
    return world.submit(trunk + own, chance.randint(1, 9), chance.choice((1, 1, 1, 3)))


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("seed", range(9))
def test_a_long_life_of_evictions_hits_and_is_exact(seed, window):
    """Beside cancels, steps that fail, purges of everything, and restarts."""
    chance = random.Random(seed)
    sizes = chance.choice((26, 60)), chance.choice((4, 12))
    world = World(seed, *sizes, (0.0, 0.05, 0.2)[seed % 3], window=window)
    for step in range(150):
        ask_on(world, chance)
        for _ in range(chance.randrange(6)):
            world.turn()
            assert all(each.pool.num_free <= each.pool.num_blocks for each in world.groups)
        for _ in range(chance.randrange(5)):
            tier = chance.choice(("device", "host", "disk"))
            world.evict(chance.randrange(2), tier, chance.randrange(1000))
        going = [name for name in world.asked if name not in world.ended]
        if going and chance.random() < 0.1:
            world.engine.abort(chance.choice(going))
        world.runner.failing |= chance.random() < 0.05
        if step % 40 == 39:
            world.restart()
        if step % 70 == 69:
            world.purge_all()
    world.finish()
    assert world.hits > 300
