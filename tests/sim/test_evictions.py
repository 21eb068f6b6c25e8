"""Operators evict blocks while these are loaded: memory knows at the end what is below it."""

import pytest

from tests.sim.test_prefetch import OLD
from tests.sim.watched import BLOCK
from tests.sim.world import World
from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope
from tiers.policy.admission import WritePolicy
from tiers.tier import TierName

CHAIN = Chain(CacheScope().root(), OLD, BLOCK)


@pytest.fixture
def world() -> World:
    """OLD stands on disk alone."""
    world = World(device_blocks=60, write_policy=WritePolicy.WRITE_THROUGH)
    world.mover._fail_rate = 0.0
    world.ask("old", OLD, max_tokens=1)
    world.sink()
    return world


def test_blocks_loaded_before_the_disk_has_dropped_them_are_written_again(world):
    removed = world.cache.operations.evict(CHAIN.keys)
    world.submit("again", OLD, max_tokens=1)
    while world.live():
        world.mover.read()
        world.turn()
    assert 4 * BLOCK == world.counts("again").hit_disk
    assert [True] * 4 == world.tier.held(CHAIN.keys)
    world.settle()
    assert {TierName.DEVICE: 0, TierName.HOST: 0, TierName.DISK: 4} == removed.result()
    world.check()
    world.sink()
    assert [True] * 4 == world.tier.held(CHAIN.keys)


def test_blocks_dropped_while_they_load_are_not_taken_to_be_below(world):
    """The reader has read them, and is done only after the writer."""
    mover = world.mover
    removed = world.cache.operations.evict(CHAIN.keys)
    world.submit("again", OLD, max_tokens=1)
    world.turn()
    mover.read()
    world.turn()
    discard, load = mover._jobs
    load.run(world.tier)
    discard.run(world.tier)
    mover._jobs.clear()
    mover._untold.append(load)
    world.turn()
    assert removed.done() and ["again"] == world.live()
    world.run()
    assert 4 * BLOCK == world.counts("again").hit_disk
    world.check()


def test_blocks_evicted_while_they_load_for_nobody_are_the_disk_s_alone(world):
    world.submit("again", OLD, max_tokens=1)
    world.turn()
    world.mover.read()
    world.turn()
    world.engine.abort("again")
    world.turn()
    removed = world.cache.operations.evict(CHAIN.keys)
    world.settle()
    assert {TierName.DEVICE: 0, TierName.HOST: 0, TierName.DISK: 4} == removed.result()
    world.check_idle()
    assert not world.cache.index.match(CHAIN)


@pytest.mark.parametrize(("slots", "tier"), [(60, TierName.DEVICE), (6, TierName.HOST)])
def test_a_block_is_evicted_from_the_fastest_tier_that_has_it(slots, tier):
    world = World(device_blocks=slots, write_policy=WritePolicy.ON_SECOND_HIT)
    world.ask("old", OLD, max_tokens=1)
    world.ask("new", OLD[::-1], max_tokens=1)
    world.cache.operations.evict(CHAIN.keys[1:2])
    assert tier is world.cache.residency.evictor.evicted_keys.find(CHAIN.keys[1]).tier
