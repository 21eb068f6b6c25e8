"""Under load a waiting request's blocks rise from disk before its turn, and wait on the device."""

from array import array
from collections.abc import Sequence

import pytest

from engine.scheduling.sequence import SequenceState
from tests.sim.watched import BLOCK
from tests.sim.world import World
from tiers.blocks.keys import CacheScope, prefix_keys, token_bytes
from tiers.policy.admission import WritePolicy

OLD = [*range(4 * BLOCK), 7]


def loaded(device_blocks: int = 60, num_places: int = 2, shares: Sequence[str] = ("", "")) -> World:
    """Requests of these shares run for long, and OLD stands on disk alone."""
    write_through = WritePolicy.WRITE_THROUGH
    world = World(max_running=num_places, device_blocks=device_blocks, write_policy=write_through)
    world.ask("old", OLD, max_tokens=1)
    world.sink()
    for number, share in enumerate(shares):
        world.submit(f"long{number}", [40, number, 3], max_tokens=60, share=share)
    while any(world.phase(name) != SequenceState.DECODE for name in world.live()):
        world.step()
    return world


def on_device(world: World, prompt: list[int]) -> int:
    keys = prefix_keys(CacheScope().root(), token_bytes(array("i", prompt)), BLOCK)
    blocks = [world.cache.index.get(key) for key in keys]
    return sum(block is not None and block.slot is not None for block in blocks)


@pytest.mark.parametrize(
    ("num_places", "shares"),
    [
        pytest.param(2, ("", ""), id="all places are taken"),
        pytest.param(8, "abababa", id="one is for shares of which nothing runs"),
    ],
)
def test_a_waiting_request_s_blocks_rise_before_its_turn(num_places, shares):
    world = loaded(140, num_places, shares)
    world.submit("again", OLD, max_tokens=2, share=shares[0])
    assert 0 == on_device(world, OLD)
    for _ in range(8):
        world.step()
    assert 4 == on_device(world, OLD)
    assert len(shares) == world.engine.stats().num_running
    world.check()
    assert (4 * BLOCK, 1) == (world.counts("again").hit_disk, world.counts("again").miss)
    world.check_idle()


def test_only_the_next_requests_are_promoted():
    """The others' turn is far off, and device room is for running requests."""
    world = loaded()
    for number in range(6):
        world.submit(f"waits{number}", [*OLD[:-1], number], max_tokens=1)
    for _ in range(8):
        world.step()
    tickets = [s for s in world.engine._scheduler.waiting if s.ticket is not None]
    assert 2 == len(tickets)
    world.check()


def test_running_requests_get_room_before_waiting_ones():
    """Two that run are about to fill the device: nothing is brought up beside them."""
    world = loaded(device_blocks=2 * 64 // BLOCK)
    while len(world.tokens("long0")) < 50:
        world.step()
    world.submit("again", OLD, max_tokens=2)
    for _ in range(3):
        world.step()
        assert [None] == [s.ticket for s in world.engine._scheduler.waiting]
    world.check()
    assert 0 == world.engine.stats().num_preemptions
    world.check_idle()
