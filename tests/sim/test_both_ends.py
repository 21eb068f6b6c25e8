"""A long prefix on disk whose front is computed while its rear loads, and what can go wrong."""

import random
from collections.abc import Container

import pytest

from api.journal.why import ReasonKind, why
from engine.request import FinishReason
from tests.sim.life import Life
from tests.sim.test_failed_copies import Refusing
from tests.sim.test_prefetch import sink
from tests.sim.watched import BLOCK
from tests.sim.world import World
from tiers.blocks.keys import CacheScope
from tiers.policy.admission import WritePolicy
from tiers.tier import TierName
from tiers.transfer.economy import SPLIT_BLOCKS, LoadEconomy

NUM_BLOCKS = 20
OLD = [number * 7 % 39 for number in range(NUM_BLOCKS * BLOCK)] + [7]


class Front(LoadEconomy):
    """Computes this many blocks, whatever was measured."""

    num_blocks = 0

    def front(self, num_blocks: int, num_tokens: int, nbytes: int, num_readers: int) -> int:
        return self.num_blocks


def on_disk(front: int, **more: object) -> World:
    """A world in which OLD is on disk alone."""
    more = {"device_blocks": 60, "host_blocks": 60, "step_tokens": 2 * BLOCK} | more
    world = World(both_ends=True, write_policy=WritePolicy.WRITE_THROUGH, **more)  # type: ignore[arg-type]
    fault_rate, world.tier.fault_rate = world.tier.fault_rate, 0.0
    world.submit("old", OLD, max_tokens=1)
    world.run()
    sink(world)
    world.tier.fault_rate = fault_rate
    economy = Front()
    economy.num_blocks = front
    world.cache._promoter._economy = economy
    return world


def turns(world: World, seed: int, *, slow: float) -> int:
    """Runs to the end, with a job of the disk between turns now and then. Returns the turns."""
    rng, number = random.Random(seed), 0
    while world.live():
        number += 1
        assert number < 2000, f"stuck: {world.live()}"
        if not world.turn() or rng.random() > slow:
            world.mover.run(1)
    return number


@pytest.mark.parametrize("front", range(1, NUM_BLOCKS))
@pytest.mark.parametrize("slow", [0.0, 0.5, 0.9])
def test_every_meeting_point_gives_the_same_tokens(front: int, slow: float) -> None:
    world = on_disk(front)
    world.mover._fail_rate = 0.0
    before = world.runner.computed
    world.submit("again", OLD, max_tokens=3)
    turns(world, front, slow=slow)
    world.check()
    counts = world.counts("again")
    assert ((NUM_BLOCKS - front) * BLOCK, front * BLOCK + 1) == (counts.hit_disk, counts.miss)
    assert 0 == world.engine.stats().num_preemptions
    assert front * BLOCK + 1 + 2 == world.runner.computed - before, "nothing is computed twice"
    assert {"uneconomic": front * BLOCK, "tail": 1} == {
        str(reason): tokens for reason, tokens in world.outputs["again"][0].miss_reasons.items()
    }
    lookup = world.outputs["again"][0].lookup
    assert lookup is not None
    assert [None, TierName.DISK, None] == [run.source for run in lookup.runs]
    reason = why(lookup, 0.0)
    assert (ReasonKind.REFUSED, 0) == (reason.kind, reason.token)
    world.check_idle()


@pytest.mark.parametrize("front", [1, 7, 19])
def test_the_last_token_of_a_prompt_that_ends_with_a_block_is_computed(front: int) -> None:
    """It is no hit, though its block was loaded."""
    world = on_disk(front)
    world.mover._fail_rate = 0.0
    before = world.runner.computed
    world.submit("again", OLD[:-1], max_tokens=1)
    turns(world, front, slow=0.0)
    world.check()
    counts = world.counts("again")
    assert ((NUM_BLOCKS - front) * BLOCK - 1, front * BLOCK + 1) == (counts.hit_disk, counts.miss)
    assert front * BLOCK == world.runner.computed - before  # the last token is not written again
    assert {"uneconomic": front * BLOCK, "tail": 1} == {
        str(reason): tokens for reason, tokens in world.outputs["again"][0].miss_reasons.items()
    }
    world.check_idle()


@pytest.mark.parametrize("seed", range(40))
def test_a_faulty_disk_costs_hits_and_no_answer(seed: int) -> None:
    rng = random.Random(seed)
    world = on_disk(rng.randrange(1, NUM_BLOCKS), fault_rate=0.2, seed=seed)
    world.mover._fail_rate = 0.3
    world.submit("again", OLD, max_tokens=3)
    turns(world, seed, slow=rng.random() * 0.9)
    world.check()
    counts = world.counts("again")
    assert counts.hit + counts.miss == len(OLD)
    world.check_idle()


@pytest.mark.parametrize("seed", range(60))
def test_what_happens_in_the_middle_harms_nothing(seed: int) -> None:
    """An abort, a preemption, a purge, or others who want the same or other blocks."""
    rng = random.Random(seed)
    small = {"device_blocks": rng.choice([24, 26, 40]), "host_blocks": rng.choice([4, 12, 40])}
    world = on_disk(rng.randrange(1, NUM_BLOCKS), seed=seed, **small)
    world.submit("again", OLD, max_tokens=3)
    scheduler, purges = world.engine._scheduler, list[object]()
    for number in range(rng.randrange(1, 12)):
        world.turn()
        if rng.random() < 0.3:
            world.mover.run(1)
        event = rng.randrange(6)
        if event == 0 and number > 2 and rng.random() < 0.3:
            world.engine.abort("again")
        elif event == 1 and scheduler.running:
            scheduler._preempt(rng.choice(scheduler.running))
        elif event == 2:
            world.submit(f"same{number}", [*OLD[: rng.randrange(1, len(OLD))], 3], max_tokens=2)
        elif event == 3:
            world.submit(f"other{number}", [rng.randrange(39)] * 30, max_tokens=2)
        elif event == 4 and rng.random() < 0.2:
            purges.append(world.cache.operations.purge([CacheScope().root()]))
    turns(world, seed, slow=rng.random() * 0.9)
    world.runner.copies_fail |= bool(purges)  # a front that was purged is computed again
    world.check()
    for name in world.outputs:
        counts = world.counts(name)
        assert counts.hit + counts.miss == counts.prompt
    world.check_idle()


class Drawn(LoadEconomy):
    """Computes a drawn part of whatever is on disk, however short."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance = chance
        self.num_split = 0

    def front(self, num_blocks: int, num_tokens: int, nbytes: int, num_readers: int) -> int:
        front = self.chance.randrange(num_blocks)
        self.num_split += front > 0
        return front


def lived(seed: int, *, copies_fail: bool) -> int:
    """Cancels, pins, purges, evictions, faults of the disk, of steps and of copies. Returns how
    many prefixes were split."""
    chance = random.Random(seed * 9173 + copies_fail)
    world = World(
        device_blocks=chance.choice((14, 24, 60)),
        host_blocks=chance.choice((4, 16, 40)),
        disk_blocks=300,
        fault_rate=chance.choice((0.0, 0.1, 0.4)),
        seed=seed,
        share_tails=seed % 3 != 0,
        write_policy=chance.choice(list(WritePolicy)),
        late_copies=seed % 2 == 1,
        both_ends=True,
    )
    economy = world.cache._promoter._economy = Drawn(chance)
    world.runner.copies_fail = copies_fail
    if copies_fail:
        Refusing(world.cache.pool, {n for n in range(20_000) if chance.randrange(10) == 0})
    life = Life(world, chance, arrivals=0.01)

    acts = (life.pin, life.unpin, life.evict, life.purge, life.trouble_disk, life.break_step)
    life.run(100, (*acts, *[life.evict_idle] * 15))
    world.runner.copies_fail |= bool(life.purges)  # a front that was purged is computed again
    world.check()
    world.check_idle()
    return economy.num_split


@pytest.mark.parametrize("copies_fail", [False, True])
@pytest.mark.parametrize("first", range(0, 20, 5))
def test_any_interleaving_is_exact(first: int, copies_fail: bool) -> None:
    assert sum(lived(seed, copies_fail=copies_fail) for seed in range(first, first + 5)) >= 3


@pytest.mark.parametrize("front", [1, 7, 19])
def test_whichever_copy_fails_the_answer_stays_and_nothing_leaks(front: int) -> None:
    def copies(refused: Container[int]) -> Refusing:
        world = on_disk(front)
        world.mover._fail_rate = 0.0
        refusing = Refusing(world.cache.pool, refused)
        world.runner.copies_fail = True
        world.submit("again", OLD, max_tokens=3)
        turns(world, front, slow=0.5)
        world.check()
        world.check_idle()
        return refusing

    num_copies = copies(()).num_copies
    assert num_copies > 0
    for number in range(num_copies):
        assert 1 == copies((number,)).num_refused


def test_an_abort_before_the_meeting_is_billed_for_what_was_computed() -> None:
    world = on_disk(10)
    world.submit("again", OLD, max_tokens=3)
    for _ in range(4):
        world.turn()
        world.mover.run(1)
    [running] = world.engine._scheduler.running
    assert running.meeting is not None
    world.engine.abort("again")
    world.run()
    told = world.outputs["again"][-1]
    assert FinishReason.ABORT is told.finish
    assert (0, running.prompt_done) == (told.counts.hit, told.counts.miss)
    world.check_idle()


def test_it_loads_whole_beside_others() -> None:
    """While something else runs, loading costs nobody anything."""
    world = on_disk(10)
    world.submit("first", [40, 3], max_tokens=40)
    world.turn()
    world.submit("again", OLD, max_tokens=3)
    turns(world, 1, slow=0.0)
    assert NUM_BLOCKS * BLOCK == world.counts("again").hit_disk


@pytest.mark.parametrize(
    ("num_readers", "num_blocks", "pays"),
    [(1, 20, False), (4, 20, True), (4, 8, False), (4, 4, False), (4, 12, True)],
)
def test_a_prefix_is_weighed_by_all_who_read_it_at_once(
    num_readers: int, num_blocks: int, pays: bool
) -> None:
    """One reader loads a block in the time in which 2.5 are computed, and reads four at a time."""
    world = on_disk(0)
    world.tier.fault_rate = world.mover._fail_rate = 0.0
    world.mover.num_readers = num_readers
    economy = world.cache._promoter._economy
    economy.load_bytes_per_s = float(world.cache.layout.nbytes)
    economy.prefill_tokens_per_s = 2.5 * BLOCK
    world.submit("again", [*OLD[: num_blocks * BLOCK], 38], max_tokens=1)
    turns(world, 1, slow=0.0)
    assert num_blocks * BLOCK * pays == world.counts("again").hit_disk


def test_the_split_ends_both_at_once() -> None:
    economy = LoadEconomy()
    assert 0 == economy.front(100, 64, 1_000, 2)  # nothing is known yet
    economy.observe_load(1_000, 1.0)
    economy.observe_prefill(64, 1.0)
    assert 50 == economy.front(100, 64, 1_000, 1)
    assert 33 == economy.front(100, 64, 1_000, 2)  # two readers load twice as fast
    assert 0 == economy.front(SPLIT_BLOCKS - 1, 64, 1_000, 1)
    assert 0 == economy.front(100, 64, 1_000_000, 1)  # loading helps nothing
    assert 0 == economy.front(100, 64, 1, 1)
    economy.enabled = False
    assert 0 == economy.front(100, 64, 1_000, 1)
