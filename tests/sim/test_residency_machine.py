"""Blocks walk at random through the states of each tier: every transition is one that is named, all
that are named happen, and nothing is lost or had twice on the way."""

import random
from collections import Counter
from contextlib import suppress

import pytest

from tests.sim.watched import LateCopies
from tests.support.caches import cache_of
from tests.support.chain_runner import chain_layout
from tests.support.memory_tier import MemoryTier, SteppedMover
from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope
from tiers.errors import OutOfBlocks
from tiers.memory.block import (
    BELOW_MOVES,
    DEVICE_MOVES,
    HOST_MOVES,
    Below,
    Block,
    DeviceState,
    HostState,
)
from tiers.memory.device_tier import DeviceTier
from tiers.memory.host_tier import HostTier
from tiers.memory.write_queue import WriteQueue
from tiers.policy.admission import WritePolicy
from tiers.policy.retention import PinError

SIZE = 4  # tokens a block
LAYOUT = chain_layout(SIZE)
ROOT = CacheScope(tenant=b"walk").root()


class Walk:
    """Requests, pins, evictions, purges and a disk with faults, in any order."""

    def __init__(self, seed):
        self.chance = chance = random.Random(seed)
        self.now_s = 1000.0
        self.tier = MemoryTier(chance.choice((12, 60)), fault_rate=0.05, seed=seed)
        self.mover = SteppedMover(
            self.tier, seed=seed, max_jobs=chance.choice((1, 8)), late_rate=0.3
        )
        policy = chance.choice(list(WritePolicy))
        parts = {"disk": self.tier, "mover": self.mover, "wall_clock": lambda: self.now_s}
        self.cache = cache_of(LAYOUT, 14, 16, write_policy=policy, **parts)
        self.cache.residency.host_moves = chance.random() < 0.5
        if chance.random() < 0.5:
            LateCopies(self.cache.pool, chance)
        self.cache.on_purge(self._detach)
        self.tickets = []
        self.running = []  # the number that is computed

    def chain(self):
        """One of a few prompts, which begin alike."""
        kind = self.chance.randrange(12)
        length = self.chance.randint(1, 6 * SIZE)
        tokens = [9, 9, 9, 9, *(kind for _ in range(length))]
        return Chain(ROOT, tokens, SIZE)

    def open(self):
        if len(self.tickets) < 4:
            self.tickets.append(self.cache.open(self.chain()))

    def advance(self):
        for ticket in self.tickets:
            self.cache.advance(ticket)

    def close(self):
        if self.tickets:
            self.cache.close_ticket(self.tickets.pop())

    def begin(self):
        """A ticket whose blocks are all on the device becomes a running sequence."""
        for ticket in self.tickets:
            ready = all(block.slot is not None for block in ticket.blocks)
            if ready and not ticket.is_loading and ticket.probe is None:
                blocks = list(ticket.blocks)
                self.tickets.remove(ticket)
                blocks += self.cache.tables.plan(ticket.chain, len(blocks))
                self.running.append((ticket.chain, blocks, len(ticket.blocks)))
                return

    def compute(self):
        """Every running sequence fills its next block, or gives up where there is no slot."""
        tables = self.cache.tables
        for place, (chain, blocks, number) in enumerate(self.running):
            last = min(len(blocks), number + self.chance.randint(1, 6))
            try:
                for each in range(number, last):
                    tables.provide(blocks[each])
                    if each < len(chain.keys):
                        blocks[each] = tables.commit(chain, each, blocks[each])
                    self.running[place] = chain, blocks, each + 1
            except OutOfBlocks:
                self.end(place)
                return

    def end(self, place=0):
        if self.running:
            chain, blocks, number = self.running.pop(place)
            self.cache.tables.release(chain, blocks, min(number * SIZE, chain.num_tokens))

    def pin(self):
        with suppress(PinError):  # too much is pinned already
            self.cache.operations.pin(f"p{self.chance.randrange(3)}", self.chain(), self.now_s + 20)

    def purge(self):
        self.cache.operations.purge([ROOT])

    def _detach(self, roots):
        for chain, _, _ in self.running:
            chain.private = True
        while self.tickets:
            self.close()

    def evict(self):
        self.cache.operations.evict(self.chain().keys)

    def step(self):
        self.now_s += 1.0
        self.cache.step()

    def turn(self):
        """Mostly things go on as they do in a server."""
        for do in (self.disk, self.step, self.advance, self.begin, self.compute, self.end):
            if self.chance.random() < 0.8:
                do()
        if self.chance.random() < 0.02:
            self.close()

    def disk(self):
        self.mover.run(self.chance.randrange(8))

    def check(self):
        """Slots and frames are conserved, and each block's references are those of its owners."""
        refs = Counter()
        for ticket in self.tickets:
            refs.update(ticket.blocks)
        for _, blocks, _ in self.running:
            refs.update(blocks)
        index = self.cache.index
        blocks = {*index, *index.iter_partials()}
        for block in blocks | set(refs):
            assert block.ref_count == refs[block], block
        leaving = self.cache.operations.leaving
        private = [b for b in refs if b not in blocks and b not in leaving]
        slots = sum(block.slot is not None for block in private)
        self.cache.residency.check(slots, leaving)

    def finish(self):
        while self.tickets:
            self.close()
        while self.running:
            self.end()
        for _ in range(40):
            self.mover.run(8)
            self.step()
        self.check()


@pytest.fixture
def moved(monkeypatch):
    """Counts the transitions."""
    seen = Counter()
    for owner, name in ((DeviceTier, "device"), (HostTier, "host"), (WriteQueue, "below")):
        monkeypatch.setattr(owner, "_move", _watch(owner._move, name, seen))
    return seen


def _watch(move, name, seen):
    def watched(self, block, to):
        seen[_named(getattr(block, name), to)] += 1
        move(self, block, to)

    return watched


def _named(old, new):
    return f"{old!r} to {new!r}"  # the numbers of three enumerations would be the same


# What a walk of this kind cannot bring about, or what is done where it costs least.
UNSEEN = {
    _named(DeviceState.EVICTABLE, DeviceState.IN_USE),  # `use` and `use_run` assert and set it
    _named(DeviceState.PINNED, DeviceState.IN_USE),
    _named(DeviceState.IN_USE, DeviceState.EVICTABLE),
    _named(Below.WRITING, Below.ABSENT),  # the mover took no store, and had room when asked
    _named(HostState.PINNED, HostState.ABSENT),  # only pinned blocks are left in the host
    _named(Below.REFUSED, Below.ABSENT),  # a use: `acquire_run` sets it
}


def test_every_transition_is_named_and_all_that_are_named_happen(moved):
    for seed in range(40):
        walk = Walk(seed)
        steps = [
            *(walk.open, walk.open, walk.turn, walk.turn, walk.turn, walk.turn),
            *(walk.compute, walk.step, walk.disk, walk.advance, walk.end),
        ]
        for number in range(300):
            walk.chance.choice(steps)()
            if number % 20 == 0:
                walk.chance.choice((walk.pin, walk.pin, walk.evict))()
            if number == 200:
                walk.purge()
            walk.check()
        walk.finish()
    named = {
        _named(old, new)
        for states, table in (
            (DeviceState, DEVICE_MOVES),
            (HostState, HOST_MOVES),
            (Below, BELOW_MOVES),
        )
        for old in states
        for new in table[old]
    }
    assert set(moved) <= named
    assert sorted(named - UNSEEN - set(moved)) == []


def test_a_transition_that_is_not_named_is_refused():
    walk = Walk(1)
    block = Block(0.0)
    residency = walk.cache.residency
    with pytest.raises(AssertionError, match="cannot become EVICTABLE on the device"):
        residency.device._move(block, DeviceState.EVICTABLE)
    with pytest.raises(AssertionError, match="cannot become PINNED on the host"):
        residency.host._move(block, HostState.PINNED)
    with pytest.raises(AssertionError, match="cannot become ABSENT below"):
        residency.queue._move(block, Below.ABSENT)
    block.device = DeviceState.IN_USE
    with pytest.raises(AssertionError, match="in use already"):
        residency.device.use(block)
