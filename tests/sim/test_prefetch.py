"""Under load a waiting request's blocks rise from disk before its turn, and wait on the device."""

from array import array

from engine.scheduling.sequence import SequenceState
from tests.sim.watched import BLOCK
from tests.sim.world import World
from tiers.blocks.keys import CacheScope, prefix_keys, token_bytes
from tiers.policy.admission import WritePolicy

OLD = [*range(4 * BLOCK), 7]
PLACES = 2


def loaded(device_blocks: int = 60) -> World:
    """All places are taken for long, and OLD stands on disk alone."""
    world = World(
        max_running=PLACES, device_blocks=device_blocks, write_policy=WritePolicy.WRITE_THROUGH
    )
    world.ask("old", OLD, max_tokens=1)
    world.sink()
    for number in range(PLACES):
        world.submit(f"long{number}", [40, number, 3], max_tokens=60)
    while any(world.phase(f"long{number}") != SequenceState.DECODE for number in range(PLACES)):
        world.step()
    return world


def on_device(world: World, prompt: list[int]) -> int:
    keys = prefix_keys(CacheScope().root(), token_bytes(array("i", prompt)), BLOCK)
    blocks = [world.cache.index.get(key) for key in keys]
    return sum(block is not None and block.slot is not None for block in blocks)


def test_a_waiting_request_s_blocks_rise_while_all_places_are_taken():
    world = loaded()
    world.submit("again", OLD, max_tokens=2)
    assert 0 == on_device(world, OLD)
    for _ in range(8):
        world.step()
    assert 4 == on_device(world, OLD)
    assert {"long0", "long1", "again"} == set(world.live())
    world.check()
    assert (4 * BLOCK, 1) == (world.counts("again").hit_disk, world.counts("again").miss)
    world.check_idle()


def test_a_share_whose_places_are_taken_is_brought_up_though_places_wait_for_others():
    """One place in eight is for shares of which nothing runs: it is open, and not to these two."""
    world = World(max_running=8, device_blocks=140, write_policy=WritePolicy.WRITE_THROUGH)
    world.ask("old", OLD, max_tokens=1)
    world.sink()
    for number in range(7):
        world.submit(f"long{number}", [40, number, 3], max_tokens=60, share="ab"[number % 2])
    while any(world.phase(f"long{number}") != SequenceState.DECODE for number in range(7)):
        world.step()
    world.submit("again", OLD, max_tokens=2, share="a")
    for _ in range(8):
        world.step()
    assert 4 == on_device(world, OLD)
    assert 7 == world.engine.stats().num_running
    world.check()
    assert 4 * BLOCK == world.counts("again").hit_disk
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
    world = loaded(device_blocks=PLACES * 64 // BLOCK)
    while len(world.tokens("long0")) < 50:
        world.step()
    world.submit("again", OLD, max_tokens=2)
    for _ in range(3):
        world.step()
        assert [None] == [s.ticket for s in world.engine._scheduler.waiting]
    world.check()
    assert 0 == world.engine.stats().num_preemptions
    world.check_idle()
