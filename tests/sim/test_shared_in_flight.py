"""Prefixes that are being computed while others want them, and sequences that must give way."""

from engine.scheduling.sequence import Sequence
from tests.sim.watched import BLOCK
from tests.sim.world import World
from tests.support.chain_runner import replay
from tiers.telemetry.events import CacheEvent
from tiers.tier import TierName

PREFIX = list(range(40))


def halfway(num_waiters: int, *, step_tokens: int = 8) -> World:
    """A producer has computed part of its prompt; others wait for the same prefix."""
    world = World(device_blocks=100, step_tokens=step_tokens)
    world.submit("producer", PREFIX, max_tokens=1)
    world.step()
    for number in range(num_waiters):
        world.submit(f"waiter{number}", [*PREFIX, 41 + number], max_tokens=1)
    world.step()
    assert 0 < world.runner.computed < len(PREFIX)
    return world


def running(world: World) -> list[Sequence]:
    return world.engine._scheduler.running


def test_waiting_requests_do_not_delay_computing_ones():
    """More of them wait than may hold tickets while a prefix is loaded, and a step has tokens to
    spare; another prompt is served as if they were not there."""
    served_after = []
    for num_waiters in (0, 12):
        world = halfway(num_waiters, step_tokens=BLOCK + 1)
        world.submit("other", [48, 49], max_tokens=1)
        turns = 0
        while "other" in world.live():
            world.step()
            turns += 1
        assert "producer" in world.live()
        served_after.append(turns)
        world.check()
    alone, beside_waiters = served_after
    assert alone == beside_waiters


def test_a_preempted_sequence_is_next():
    world = World(device_blocks=100, max_running=1, step_tokens=8)
    for number in range(3):
        world.submit(f"r{number}", [number] * 40, max_tokens=1)
    world.step()
    world.step()
    (first,) = running(world)
    scheduler = world.engine._scheduler
    scheduler._preempt(first)
    assert first is scheduler.waiting.candidates(1, lambda s: 40 - s.start)[0]
    world.check()


def test_a_preempted_request_is_loaded_from_below_and_not_recomputed():
    """Only rows of a block that was not full are lost with the slot, at each preemption."""
    world = World(device_blocks=12, host_blocks=200)
    prompts = [[number] * 2 * BLOCK for number in range(3)]
    for number, prompt in enumerate(prompts):
        world.submit(f"r{number}", prompt, max_tokens=30)
    world.check()
    preemptions = world.engine.stats().num_preemptions
    assert preemptions > 0
    events = world.cache.stats().events
    assert events[TierName.DEVICE, CacheEvent.DEMOTED] > 0
    assert events[TierName.HOST, CacheEvent.PROMOTED] > 0
    once = sum(len(prompt) + 30 - 1 for prompt in prompts)
    assert once <= world.runner.computed <= once + preemptions * (BLOCK - 1)
    for name in world.outputs:
        assert 0 == world.counts(name).hit  # what comes back was never a hit


def test_a_filled_block_that_others_still_share_keeps_its_slot():
    """Its twin stands on the host alone: to merge the two would pull the slot from under them.

    The first of two samples copies the twin's rows and fills the copy with the same token again,
    in the very step in which the other begins to read it.
    """
    world = World(device_blocks=16, host_blocks=200)
    prompt = list(range(2 * BLOCK + 3))
    world.ask("twin", prompt, max_tokens=4, seed=1)
    for number in range(2):
        world.ask(f"flood{number}", [48 + number] * 14 * BLOCK, max_tokens=1)
    (twin,) = (b for b in world.cache.index if b.tokens[:4] == bytes([8, 0, 0, 0]))
    assert twin.slot is None and twin.frame is not None
    world.submit("samples", prompt, max_tokens=8, n=2, seed=1)
    while len(world.tokens("samples")) < 2:
        world.step()
    first, second = running(world)
    assert first.blocks[2] is second.blocks[2] and twin.slot is None
    world.ask("crowd", [48] * 8 * BLOCK, max_tokens=1)
    world.submit("again", [*prompt, *world.tokens("twin")], max_tokens=4)
    world.check()


def test_a_row_that_one_sample_filled_is_not_written_by_another():
    """Another request computes the block that it became, so each sample keeps its own copy."""
    world = World(device_blocks=100)
    prompt = list(range(2 * BLOCK + 3))
    answer = replay(prompt, 1, seed=1)
    world.submit("samples", prompt, max_tokens=6, n=2, seed=1)
    world.step()
    world.ask("next", [*prompt, *answer, 48, 49, 48, 49, 48], max_tokens=1)
    world.check()
    assert world.tokens("samples", 0) != world.tokens("samples", 1)


def test_nobody_waits_for_a_tail_that_was_copied_from_the_host():
    """It stands as it comes: there is nothing to compute."""
    world = World(device_blocks=12, host_blocks=200)
    prompt = list(range(2 * BLOCK + 1))
    world.ask("before", prompt, max_tokens=4)
    world.ask("flood", [48] * 10 * BLOCK, max_tokens=1)
    (tail,) = (b for b in world.cache.index if b.tokens[0] == 2 * BLOCK)
    assert tail.slot is None and tail.frame is not None
    world.submit("long", prompt, max_tokens=12)
    world.submit("short", prompt, max_tokens=1)
    world.step()
    world.step()
    assert ["long"] == world.live()
    world.check()
