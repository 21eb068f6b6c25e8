"""A device that refuses a copy costs a miss: answers stay, nothing leaks, and the fault is counted.

Each run is repeated with the first copy refused, then the second, and so on, to the last.
"""

import pytest

from tests.sim.watched import Refusing
from tests.sim.world import World
from tiers.errors import MissReason

SHARED = [7] * 14


def lived(refused, *, window=None):
    """Prompts that share heads and part inside a block, in little room, some of them twice."""
    world = World(device_blocks=14, host_blocks=16, disk_blocks=60, window=window)
    refusing = Refusing(world.cache.pool, refused)
    world.runner.copies_fail = True
    for turn in range(2):
        for number in range(5):
            prompt = [*SHARED, *([number] * (9 + number))]
            world.submit(f"{turn} {number}", prompt, n=1 + number % 2, seed=number)
            if number % 2:
                world.run()
        world.run()
    for number in range(3):
        world.ask(f"short {number}", SHARED[: 6 + 3 * number], max_tokens=6)
    world.check()
    world.cache.residency.check()
    stats = world.cache.stats()
    counted = [tier.faults.get(MissReason.COPY, 0) for tier in (stats.device, stats.host)]
    assert refusing.num_refused == sum(counted)
    return refusing


@pytest.mark.parametrize("window", [None, 6])
def test_whichever_copy_fails_the_answers_stay_and_nothing_leaks(window):
    num_copies = lived((), window=window).num_copies
    assert num_copies > 30
    for number in range(num_copies):
        assert 1 == lived((number,), window=window).num_refused


@pytest.mark.parametrize("window", [None, 6])
def test_a_device_that_refuses_every_copy_computes_everything(window):
    refusing = lived(range(1 << 30), window=window)
    assert refusing.num_refused == refusing.num_copies > 10


def test_the_tokens_that_a_failed_copy_cost_are_missed_for_that_reason():
    world = World(device_blocks=14, host_blocks=40, disk_blocks=1)
    for number in range(4):
        world.ask(f"{number}", [number] * 33)
    Refusing(world.cache.pool, range(1 << 30))
    world.runner.copies_fail = True
    residency = world.cache.residency
    for block in [*world.cache.index]:
        if block.slot is not None and block.frame is not None and not block.ref_count:
            residency.evict_device(block)
    before = {block: (block.slot, block.frame) for block in world.cache.index}
    world.ask("again", [0] * 33)
    world.check()
    assert 32 == world.outputs["again"][0].miss_reasons[MissReason.COPY]
    held = [(block.frame, frame) for block, (slot, frame) in before.items() if slot is None]
    assert held and all(now is then for now, then in held), "it stands where it stood"
