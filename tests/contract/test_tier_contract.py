"""What every tier off the device promises. A tier joins by one line in `TIERS`."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.faulty_storage import LAYOUT, SCOPE, chain, holds, put, take, wipe
from tests.support.memory_tier import MemoryTier
from tests.support.threads import beside
from tiers.blocks.frames import Frame, FrameArena
from tiers.blocks.keys import BlockId, CacheScope
from tiers.disk.open import open_disk
from tiers.errors import MissReason, TierClosed
from tiers.tier import Loaded, ManagedTier

CAPACITY = 2 << 20
NUM_FRAMES = 24

# A tier of about CAPACITY bytes for LAYOUT, given a folder of its own.
TIERS: dict[str, Callable[[Path], ManagedTier]] = {
    "disk": lambda folder: open_disk(folder, LAYOUT, CAPACITY),
    "disk of three shards": lambda folder: open_disk(folder, LAYOUT, 3 * CAPACITY, num_shards=3),
    "memory": lambda folder: MemoryTier(CAPACITY // LAYOUT.nbytes, block_bytes=LAYOUT.nbytes),
}


@pytest.fixture(params=TIERS)
def tier(request, tmp_path):
    tier = TIERS[request.param](tmp_path / "tier")
    yield tier
    tier.close()


@pytest.fixture
def frames():
    return take(FrameArena(LAYOUT, NUM_FRAMES), NUM_FRAMES)


def blocks(count: int, seed: int = 0, scope: CacheScope = SCOPE) -> list[BlockId]:
    return chain(count, block_size=LAYOUT.block_size, seed=seed, scope=scope)


def stored(tier: ManagedTier, frames: list[Frame], count: int, seed: int = 0) -> list[BlockId]:
    """Store a chain and wipe the frames it came from."""
    ids = blocks(count, seed)
    put(tier, ids, frames)
    wipe(frames)
    return ids


def test_stored_blocks_are_loaded(tier, frames):
    ids = stored(tier, frames, 6)
    assert tier.probe(ids) == 6
    assert tier.load(ids, frames[:6]) == Loaded(6, None)
    assert all(holds(frame, block, frames[-1]) for frame, block in zip(frames, ids, strict=False))


def test_an_empty_tier_misses(tier, frames):
    ids = blocks(3)
    assert tier.probe(ids) == 0
    assert tier.load(ids, frames[:3]) == Loaded(0, MissReason.ABSENT)
    assert tier.load([], []) == Loaded(0, None)
    assert tier.probe([]) == 0


def test_a_run_ends_at_its_first_gap(tier, frames):
    ids = stored(tier, frames, 6)
    assert tier.discard([ids[3].key]) == 1
    assert tier.probe(ids) == 3
    assert tier.load(ids, frames[:6]) == Loaded(3, MissReason.ABSENT)
    assert tier.probe(ids[4:]) == 2


def test_no_more_is_loaded_than_there_are_frames(tier, frames):
    ids = stored(tier, frames, 6)
    assert tier.load(ids, frames[:2]) == Loaded(2, None)


@pytest.mark.parametrize("field", ["scope", "parent", "tokens", "content"])
def test_an_equal_key_is_not_enough(tier, frames, field):
    """A block of the same key and another identity is a collision, and fills nothing."""
    ids = stored(tier, frames, 2)
    value = getattr(ids[1], field)
    other = ids[1]._replace(**{field: bytes(b ^ 1 for b in value) or b"image"})
    assert tier.load([ids[0], other], frames[:2]) == Loaded(1, MissReason.COLLISION)
    assert tier.probe([ids[0], other]) <= 2
    assert tier.stats().faults.get(MissReason.COLLISION) == 1
    assert tier.load(ids, frames[:2]) == Loaded(2, None)


def test_storing_again_writes_nothing(tier, frames):
    ids = stored(tier, frames, 4)
    before = tier.stats()
    assert tier.store(ids, frames[:4]) == []
    after = tier.stats()
    assert (after.num_blocks, after.stored) == (before.num_blocks, before.stored)
    assert tier.load(ids, frames[4:8]) == Loaded(4, None)
    assert holds(frames[4], ids[0], frames[-1])


def test_kept_blocks_are_not_discarded(tier, frames):
    ids = stored(tier, frames, 3)
    tier.keep([ids[0].key])
    assert 2 == tier.discard([block.key for block in ids])
    tier.keep([])
    assert [True, False, False] == tier.held([block.key for block in ids])
    assert 1 == tier.discard([block.key for block in ids])


def test_discard_says_how_many_were_held(tier, frames):
    ids = stored(tier, frames, 3)
    absent = blocks(2, seed=9)
    assert tier.discard([block.key for block in ids[1:] + absent]) == 2
    assert tier.discard([block.key for block in ids[1:]]) == 0
    assert tier.stats().num_blocks == 1


def test_scopes_do_not_meet(tier, frames):
    """The same tokens under another tenant are other blocks."""
    stored(tier, frames, 3)
    theirs = blocks(3, scope=CacheScope(weights=b"tiny", tenant=b"other"))
    assert tier.probe(theirs) == 0


def test_capacity_holds_and_the_dropped_are_named(tier, frames):
    """Ten capacities are written: what is held is exactly what was stored and not dropped."""
    held: set[bytes] = set()
    total = 0
    seed = 0
    while total < 10 * tier.stats().capacity_bytes:
        seed += 1
        ids = blocks(8, seed)
        held |= {block.key for block in ids}
        held -= set(put(tier, ids, frames))
        total += 8 * LAYOUT.nbytes
        stats = tier.stats()
        assert stats.used_bytes <= stats.capacity_bytes
    stats = tier.stats()
    assert stats.num_blocks == len(held)
    assert stats.num_blocks == stats.stored - stats.evicted
    assert not stats.faults
    last = blocks(8, seed)
    assert tier.load(last, frames[8:16]) == Loaded(8, None)
    assert holds(frames[8], last[0], frames[-1])


def test_stats_count_hits_and_misses(tier, frames):
    ids = stored(tier, frames, 3)
    tier.load(ids + blocks(2, seed=5), frames[:5])
    stats = tier.stats()
    assert (stats.hits, stats.misses, stats.stored) == (3, 2, 3)
    assert stats.num_blocks == 3
    assert stats.logical_bytes == 3 * LAYOUT.nbytes
    assert 0 < stats.read_bytes <= 3 * LAYOUT.nbytes + 3 * 4096


def test_a_closed_tier_says_so(tier, frames):
    ids = blocks(1)
    tier.close()
    tier.close()
    for call in (
        lambda: tier.probe(ids),
        lambda: tier.load(ids, frames[:1]),
        lambda: tier.store(ids, frames[:1]),
        lambda: tier.discard([ids[0].key]),
    ):
        with pytest.raises(TierClosed):
            call()


def test_readers_beside_a_writer_never_see_another_block(tier, frames):
    """While blocks are evicted and their room reused, a load is right or a miss."""
    wrong: list[str] = []
    done = threading.Event()
    chains = [blocks(4, seed) for seed in range(40)]

    def read(mine: list[Frame], spare: Frame) -> None:
        number = 0
        while not done.is_set():
            number += 1
            ids = chains[number % len(chains)]
            loaded = tier.load(ids, mine)
            for frame, block in zip(mine[: loaded.num_blocks], ids, strict=False):
                if not holds(frame, block, spare):
                    wrong.append(f"{block.key.hex()} after {number} loads")

    with beside(*(partial(read, frames[at : at + 4], frames[at + 4]) for at in (8, 16))):
        for ids in chains * 4:
            put(tier, ids, frames)
        done.set()
    assert wrong == []
    assert not set(tier.stats().faults) - {MissReason.NO_ROOM}


def fill_up(tier: ManagedTier, frames: list[Frame], first_seed: int, num_chains: int) -> None:
    for seed in range(first_seed, first_seed + num_chains):
        stored(tier, frames, 8, seed)


def test_kept_blocks_are_not_dropped_for_room(tier, frames):
    kept, other = stored(tier, frames, 4, seed=1), stored(tier, frames, 4, seed=2)
    tier.keep([block.key for block in kept])
    fill_up(tier, frames, 100, 150)
    assert (tier.probe(kept), tier.probe(other)) == (4, 0)
    tier.keep([])
    fill_up(tier, frames, 300, 150)
    assert tier.probe(kept) == 0


def test_a_block_is_found_by_its_key(tier, frames):
    ids = stored(tier, frames, 4)
    missing = blocks(1, seed=9)[0]
    assert tier.held([ids[3].key, missing.key, ids[0].key]) == [True, False, True]
    assert (tier.trace(ids[2].key), tier.trace(missing.key)) == (ids[2], None)


def test_a_purge_removes_one_scope_and_keeps_the_others(tier, frames):
    ids = stored(tier, frames, 6)
    scope = CacheScope(weights=b"tiny", tenant=b"other")
    others = blocks(3, scope=scope)
    tier.store(others, frames[:3])
    assert tier.count([ids[0].scope]) == 6
    assert tier.purge([ids[0].scope]).num_blocks == 6
    assert (tier.count([ids[0].scope]), tier.count([scope.root()])) == (0, 3)
    assert (tier.probe(ids), tier.probe(others)) == (0, 3)
