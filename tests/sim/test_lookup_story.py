"""A request's lookup says which tier served which tokens, and why the first missed block missed."""

import time

import pytest

from engine.request import Lookup
from tests.sim.watched import BLOCK
from tests.sim.world import World
from tiers.blocks.keys import PrefixKey, token_bytes
from tiers.errors import MissReason
from tiers.telemetry.misses import MARK_BYTES, EvictedKeys, marks_of
from tiers.tier import Cause, TierName

FIRST = [*range(1, 3 * BLOCK + 2)]  # three full blocks and a token


def ask(world: World, name: str, prompt: list[int], **options: object) -> Lookup:
    world.submit(name, prompt, max_tokens=1, **options)
    world.run()
    return world.outputs[name][0].lookup


def told(lookup: Lookup) -> list[tuple[str | None, int, int]]:
    return [(run.source and str(run.source), run.start, run.num_tokens) for run in lookup.runs]


def test_a_first_prompt_was_never_seen_and_a_second_is_served_but_for_its_last_token():
    world = World()
    lookup = ask(world, "a", FIRST)
    assert told(lookup) == [(None, 0, len(FIRST))]
    assert lookup.stop is MissReason.ABSENT and lookup.absence is not None
    assert (lookup.absence.departure, lookup.absence.rows) == (None, 0)
    lookup = ask(world, "b", FIRST)
    assert told(lookup) == [("device", 0, len(FIRST) - 1), (None, len(FIRST) - 1, 1)]
    assert lookup.absence is None


@pytest.mark.parametrize("share_tails", [True, False])
def test_a_diverging_prompt_reports_where_and_from_which_block(share_tails):
    world = World(share_tails=share_tails)
    ask(world, "a", FIRST)
    other = [*FIRST[: BLOCK + 2], *[40] * (2 * BLOCK)]
    lookup = ask(world, "b", other)
    absence = lookup.absence
    assert absence is not None and absence.parted and absence.rows == 2
    assert absence.sibling is not None and world.cache.index.get(absence.sibling) is not None
    served = 2 if share_tails else 0
    assert told(lookup)[-1] == (None, BLOCK + served, len(other) - BLOCK - served)


def test_a_prompt_that_continues_another_does_not_diverge_from_it():
    world = World()
    ask(world, "a", FIRST[: BLOCK + 2])
    absence = ask(world, "b", [*FIRST[: BLOCK + 2], *[40] * (2 * BLOCK)]).absence
    assert absence is not None and (2, False) == (absence.rows, absence.parted)


def test_an_evicted_block_is_distinguished_from_one_never_seen():
    world = World(host_blocks=16, disk_blocks=4)
    ask(world, "a", FIRST)
    for number in range(30):
        ask(world, f"filler {number}", [number + 1, 7, *range(4 * BLOCK)])
    absence = ask(world, "again", FIRST).absence
    assert absence.departure.cause is Cause.ROOM
    assert absence.departure.tier in (TierName.HOST, TierName.DISK)


def test_a_partly_filled_block_lived_no_longer_than_it_stood():
    world, began_s = World(device_blocks=8), time.monotonic()
    for number in range(8):
        ask(world, str(number), [number, *FIRST[:BLOCK]])
    lives = world.cache.residency.counters.lives[TierName.DEVICE].stats()
    assert lives.lifetime.count > 0
    assert lives.lifetime.total <= lives.lifetime.count * (time.monotonic() - began_s)


def test_a_request_without_the_cache_says_so():
    lookup = ask(World(), "a", FIRST, cache=False)
    assert lookup.stop is MissReason.DISABLED and lookup.absence is None


def test_marks_tell_where_two_blocks_part_under_one_seed_only():
    world = World()
    absence = ask(world, "a", FIRST).absence
    seed = world.cache.operations.mark_seed
    other = marks_of(token_bytes([*FIRST[:2], 40, 41]), seed)
    assert 2 == absence.common(other)
    assert BLOCK == absence.common(marks_of(token_bytes(FIRST[:BLOCK]), seed))
    assert 0 == absence.common(marks_of(token_bytes(FIRST[:BLOCK]), seed + 1))
    assert len(other) == BLOCK * MARK_BYTES


def test_departures_are_bounded_and_keep_the_latest():
    evicted_keys = EvictedKeys(2)
    keys = [PrefixKey(bytes([number]) * 16) for number in range(3)]
    evicted_keys.note(keys[0], TierName.HOST, Cause.ROOM)
    evicted_keys.note(keys[1], TierName.HOST, Cause.ROOM)
    evicted_keys.note(keys[0], TierName.DISK, Cause.REQUEST)
    evicted_keys.note(keys[2], TierName.HOST, Cause.ROOM)
    assert evicted_keys.find(keys[1]) is None and len(evicted_keys) == 2
    kept = evicted_keys.find(keys[0])
    assert kept is not None and (kept.tier, kept.cause) == (TierName.DISK, Cause.REQUEST)
