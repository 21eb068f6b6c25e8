"""What memory gives up the disk has by then: written behind, and where it cannot, heads before
tails."""

import gc
import random

import pytest

from tests.sim.watched import BLOCK
from tests.sim.world import World
from tests.unit.test_pins_kept import Bench
from tiers.memory.block import Below, Block
from tiers.memory.losses import LossLog
from tiers.policy.admission import WritePolicy
from tiers.telemetry.events import CacheEvent
from tiers.tier import TierName
from tiers.transfer.demotion import Demoter
from tiers.transfer.promotion import BLOCKS_PER_LIFT

LENGTH = 14  # blocks of a prompt


def prompts(bench, count):
    return [bench.chain(1_000 * number, LENGTH) for number in range(count)]


def lost(bench):
    return lost_of(bench.cache.stats().events)


def lost_of(events):
    return sum(count for (_, event), count in events.items() if event is CacheEvent.LOST)


def drop_at_the_next_store(bench, chain):
    """Have the disk give up a chain's blocks just before it writes others."""
    store = bench.tier.store

    def drop_first(*written):
        bench.tier.store = store
        bench.tier.discard(chain.keys)
        return [*store(*written), *chain.keys]

    bench.tier.store = drop_first


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_none_is_lost_with_few_steps_between_prompts(steps):
    """A writer that finishes between two steps is given enough at each."""
    bench = Bench(device=45, host=56, disk=4000)
    for chain in prompts(bench, 40):
        bench.compute(chain)
        for _ in range(steps):
            bench.mover.run(1000)
            bench.cache.step()
    assert lost(bench) == 0


def test_an_idle_writer_writes_all_that_the_host_has():
    bench = Bench(device=45, host=56, disk=400)
    chains = prompts(bench, 5)
    for chain in chains:
        bench.serve(chain)
    bench.settle()
    framed = [block for block in bench.cache.index if block.frame is not None]
    assert len(framed) >= 25
    assert all(block.held_below for block in framed)


def test_what_comes_down_once_is_written_once():
    bench = Bench(device=45, host=56, disk=400)
    chains = prompts(bench, 6)
    for _ in range(3):
        for chain in chains:
            bench.serve(chain)
    written = bench.tier.stats().stored
    assert written <= 6 * LENGTH


def test_a_writer_that_is_behind_leaves_prefixes_whole():
    """Where blocks must be lost, the disk has leading blocks of each prompt, and no others."""
    bench = Bench(device=30, host=28, disk=400)
    chains = prompts(bench, 12)
    for number, chain in enumerate(chains):
        bench.compute(chain)
        bench.cache.step()
        if number % 3 == 2:
            bench.mover.run(1)  # a batch of 8 blocks, while 42 came down
    assert lost(bench) > 0
    bench.settle()
    for chain in chains:
        held = bench.tier.held(chain.keys)
        assert held == sorted(held, reverse=True), "a block stands there without what leads to it"


def test_what_the_policy_does_not_write_is_not_written_behind():
    bench = Bench(device=20, host=30, disk=400, write_policy=WritePolicy.ON_SECOND_HIT)
    for chain in prompts(bench, 8):
        bench.serve(chain)
    assert bench.tier.stats().stored == 0
    events = bench.cache.stats().events
    assert events[TierName.HOST, CacheEvent.SKIPPED] > 0
    assert lost(bench) == 0, "what is not to be written is not lost"


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_loses_nothing_over_a_disk_that_keeps_up(seed):
    """Prompts of up to a third of the host, several at once, cancelled and preempted."""
    chance = random.Random(seed)
    world = World(device_blocks=30, host_blocks=40, disk_blocks=10_000, seed=seed, max_running=3)
    for number in range(80):
        length = BLOCK * chance.randint(1, 13)
        world.submit(f"r{number}", [chance.randrange(40) for _ in range(length)], max_tokens=2)
        for _ in range(chance.randint(1, 8)):
            world.step()
        if chance.random() < 0.1:
            world.engine.abort(f"r{number}")
    while world.live():
        world.step()
    world.check()
    world.check_idle()
    events = world.cache.stats().events
    assert events[TierName.HOST, CacheEvent.EVICTED] > 100
    assert lost_of(events) == 0


def test_a_copy_unused_since_its_write_is_written_again_once_the_disk_evicts_it():
    """An import beside the server makes its blocks the oldest of a full disk: they leave it while
    the host still has them."""
    bench = Bench(device=16, host=40, disk=400)
    chain = bench.chain(0, 6)
    bench.serve(chain)
    bench.scan(16)
    blocks = [bench.cache.index.get(key) for key in chain.keys]
    assert all(block and block.slot is None and block.below is Below.HELD for block in blocks)
    store = bench.tier.store
    drop_at_the_next_store(bench, chain)
    bench.scan(60, first=90_000)
    assert bench.tier.store == store
    assert lost(bench) == 0
    assert bench.tier.held(chain.keys) == [True] * 6


@pytest.mark.parametrize("disk", [9, 30, 60])
def test_a_disk_far_smaller_than_the_host_is_not_written_for_ever(disk):
    """Each write evicts a block that the host has, and would be to write again."""
    bench = Bench(device=45, host=400, disk=disk)
    for number, chain in enumerate(prompts(bench, 60)):
        bench.compute(chain)  # bursts of 140 blocks, which the cold end must be clean for
        if number % 10 == 9:
            bench.settle()
    for _ in range(40):
        bench.settle()
    stored = bench.tier.stats().stored
    for _ in range(40):
        bench.settle()
    assert bench.tier.stats().stored == stored
    assert bench.cache._demoter.num_stores == 0


def test_a_long_prompt_is_reckoned_with_for_several_turnovers():
    """Over a disk that is full, where only what may have to leave at once is written ahead."""
    bench = Bench(device=30, host=80, disk=200)
    for long in range(4):
        bench.serve(bench.chain(500_000 + 1_000 * long, 28))
        bench.scan(3 * 80, first=10_000 + 50_000 * long)
    assert lost(bench) == 0


def test_a_hit_loses_no_more_than_the_frames_that_it_is_read_into(monkeypatch):
    """All frames wait for the writer, and the device is full of what only it has: what leaves that
    goes to the frames that blocks were lifted from."""
    monkeypatch.setattr(Demoter, "_watch_bursts", lambda self: None)  # looks at the coldest 8 only
    bench = Bench(device=40, host=100, disk=800)
    hit = bench.chain(0, 32)
    bench.serve(hit)
    bench.scan(160)
    bench.settle()
    for number in range(4):
        bench.compute(bench.chain(50_000 + 1_000 * number, 36))
    before = lost(bench)
    assert bench.compute(hit) == 32
    assert lost(bench) - before <= 32 + BLOCKS_PER_LIFT


def test_a_block_that_left_memory_is_forgotten():
    """Also one that was copied up from the host, and has left both."""
    before = num_blocks()
    bench = Bench(device=20, host=60, disk=400)
    chains = prompts(bench, 4)
    for turn in range(40):
        bench.serve(chains[turn % 4])
        bench.scan(30, first=100_000 + 1_000 * turn)
        bench.settle()
    assert bench.cache.stats().transfers[TierName.HOST, TierName.DEVICE].num_blocks > 3 * (20 + 60)
    rings = 2
    assert num_blocks() - before <= 20 + 60 + rings


def num_blocks():
    gc.collect()
    return sum(1 for each in gc.get_objects() if type(each) is Block)


def test_what_the_disk_refuses_is_lost_once_memory_gives_it_up(monkeypatch):
    bench = Bench(device=20, host=30, disk=400)
    monkeypatch.setattr(bench.tier, "store", lambda ids, *_: [block.key for block in ids])
    for chain in prompts(bench, 8):
        bench.serve(chain)
    in_memory = len({block.key for block in bench.cache.index})
    assert lost(bench) == 8 * LENGTH - in_memory


def test_blocks_that_are_lost_are_said_in_the_log_once_a_minute(caplog):
    now_s = 1000.0
    losses = LossLog(lambda: now_s)
    waiting, refused = Block(0.0), Block(0.0)
    waiting.below, refused.below = Below.WAITING, Below.REFUSED
    for block in (waiting, refused, refused):
        losses.note(block)
    now_s += 61
    losses.note(waiting)
    first, second = [record.getMessage() for record in caplog.records]
    assert "1 block(s) left memory" in first
    assert "(not written yet: 1, not taken by the disk: 0); a larger" in first
    assert "3 block(s) left memory" in second
    assert "(not written yet: 1, not taken by the disk: 2); a larger" in second


def test_a_flush_passes_over_what_was_being_written_as_it_began(monkeypatch):
    """Each block is below once, whether its store was under way or still to come."""
    bench = Bench(device=45, host=56, disk=400)
    for chain in prompts(bench, 4):
        bench.compute(chain)
    bench.cache.step()
    under_way = [block for block in bench.cache.index if block.below is Below.WRITING]
    assert under_way
    monkeypatch.setattr("tiers.transfer.demotion.time.sleep", lambda s: bench.mover.run(1000))
    assert bench.cache.flush() == 0
    assert all(block.held_below for block in bench.cache.index)
    assert bench.tier.stats().stored == 4 * LENGTH


def test_what_chunks_push_out_has_been_copied_down_before():
    """However large the chunks: a slot is taken without a copy in its step."""
    world = World(device_blocks=256, host_blocks=400, step_tokens=32)
    residency = world.cache.residency
    demote, late = residency.evictor.demote, []

    def noted(block):
        late.append(block)
        return demote(block)

    residency.evictor.demote = noted
    for number in range(20):
        world.submit(f"{number}", [number % 40] * 101, max_tokens=1, tenant=bytes([number]))
        world.run()
        if residency.evictor.num_slots_taken < 30:
            late.clear()  # nothing is clean before the first blocks leave
    assert residency.evictor.num_slots_taken > 200
    assert 0 == len(late)
