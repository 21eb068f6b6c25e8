"""What a request leaves behind is freed when it ends: the garbage collector has nothing to find, so
it may run seldom, and a cache of many blocks is not looked through for nothing."""

import gc
import random
from collections.abc import Iterator

import pytest

from tests.sim.world import World


@pytest.fixture
def garbage() -> Iterator[list[object]]:
    """What `gc.collect` finds from here on, instead of its freeing it."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def test_requests_leave_no_cycles(garbage):
    """Hits from every tier, shared prefixes, preemption, samples and cancels."""
    chance = random.Random(7)
    world = World(device_blocks=24, host_blocks=16, disk_blocks=200)
    for number in range(60):
        kind, length = chance.randrange(8), chance.randint(2, 40)
        world.submit(f"r{number}", [kind] * length, max_tokens=3, n=chance.choice((1, 1, 2)))
        for _ in range(chance.randrange(6)):
            world.step()
        if chance.random() < 0.1:
            world.engine.abort(f"r{number}")
        if number % 20 == 19:
            world.run()
    world.run()
    gc.collect()
    ours = [each for each in garbage if type(each).__module__.split(".")[0] in ("tiers", "engine")]
    assert [] == ours
