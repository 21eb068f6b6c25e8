"""On disk the window part of a block is a record of its own: read, renewed, evicted, moved, removed
and verified apart from the rest, and no block by itself."""

import random
from contextlib import closing

import pytest

from tests.support.faulty_storage import SCOPE, chain, fill, put, take, wipe
from tests.unit.test_remote_tier import Objects
from tiers.blocks.frames import FrameArena
from tiers.blocks.layout import BlockLayout, LayerLayout
from tiers.blocks.part import Part
from tiers.disk.format.record import Header, unpack_header, window_key
from tiers.disk.inspection.maintenance import delete, pages
from tiers.disk.inspection.opening import open_shards
from tiers.disk.inspection.verify import verify_all
from tiers.disk.inspection.view import open_view
from tiers.disk.open import open_disk
from tiers.errors import MissReason
from tiers.remote.settings import RemoteWrites
from tiers.remote.stacked import StackedTier
from tiers.remote.tier import RemoteTier
from tiers.tier import Loaded, TierName

SIZE, CAPACITY = 16, 2 << 20
FULL, SLIDING = LayerLayout(2, 64, 64), LayerLayout(2, 64, 64, window=40)
LAYOUT = BlockLayout((SLIDING, FULL, SLIDING, SLIDING), SIZE, "float32")  # 64 KiB, 16 without
FRAMES = take(FrameArena(LAYOUT, 9), 9)
LASTING, WINDOW, WHOLE = Part.LASTING, Part.WINDOW, Part.WHOLE


def opened(root, *, num_shards=1, capacity=CAPACITY):
    return open_disk(root, LAYOUT, capacity, num_shards=num_shards, check_s=60)


def blocks(seed=0, count=4):
    return chain(count, block_size=SIZE, seed=seed)


def store(tier, ids):
    return put(tier, ids, FRAMES)


def load(tier, ids, *parts):
    """Every part that was loaded is compared, and that nothing else was written."""
    split, spare = LAYOUT.lasting_nbytes, FRAMES[8]
    frames = FRAMES[: len(ids)]
    wipe(frames)
    for frame, part in zip(frames, parts, strict=True):
        frame.part = part
    try:
        loaded = tier.load(ids, frames)
        for frame, block in zip(frames[: loaded.num_blocks], ids, strict=False):
            fill(spare, block)
            for own, part in ((slice(split), LASTING), (slice(split, None), WINDOW)):
                there = frame.buffer[own] == spare.buffer[own]
                assert there == (frame.part in (part, WHOLE)), (block.key.hex(), part)
    finally:
        for frame in frames:
            frame.part = WHOLE
    return loaded


def windows_of(ids):
    return [window_key(block.key) for block in ids]


def keys_of(ids):
    return [block.key for block in ids]


def sound(root):
    with open_view(root) as view:
        verified = verify_all(view.shards)
    assert verified.sound, verified
    return verified.num_blocks


@pytest.fixture(params=[1, 3])
def tier(tmp_path, request):
    with closing(opened(tmp_path / "disk", num_shards=request.param, capacity=6 << 20)) as tier:
        yield tier


def test_each_part_is_read_alone_and_a_missing_one_ends_the_run(tier):
    ids = blocks()
    assert [] == store(tier, ids)
    assert [True] * 4 == tier.have_windows(ids)
    assert 4 == load(tier, ids, LASTING, LASTING, WINDOW, WHOLE).num_blocks
    before = tier.stats().read_bytes
    assert 4 == load(tier, ids, *[LASTING] * 4).num_blocks
    assert tier.stats().read_bytes - before < 5 * LAYOUT.lasting_nbytes
    assert 0 == tier.discard(windows_of(ids[1:2])), "no block by itself"
    assert [True, False, True, True] == tier.have_windows(ids)
    assert 4 == tier.probe(ids) == tier.stats().num_blocks
    assert Loaded(1, MissReason.ABSENT) == load(tier, ids, *[WHOLE] * 4)
    assert Loaded(0, MissReason.ABSENT) == load(tier, ids[1:2], WINDOW)
    assert 4 == load(tier, ids, WHOLE, LASTING, WHOLE, WINDOW).num_blocks
    assert not tier.stats().faults


def test_a_block_that_is_held_gets_its_window_back(tier):
    ids = blocks()
    store(tier, ids)
    tier.discard(windows_of(ids))
    written = tier.stats().written_bytes
    assert [] == store(tier, ids)
    assert 4 * LAYOUT.nbytes > tier.stats().written_bytes - written > 2 * LAYOUT.nbytes
    assert 4 == load(tier, ids, *[WHOLE] * 4).num_blocks
    assert 4 == tier.stats().stored


def test_windows_that_no_use_needs_leave_before_their_blocks(tmp_path):
    with closing(opened(tmp_path / "disk")) as tier:
        ids, ended = blocks(count=8), blocks(seed=1, count=8)
        store(tier, ids)
        store(tier, ended)
        for seed in range(2, 8):
            load(tier, ids, *[LASTING] * 7, WHOLE)  # a hit that goes on
            tier.demoted(keys_of(ended), [0.0] * 8, [False] * 6 + [True] * 2)
            dropped = store(tier, blocks(seed, count=4))
            assert not {*keys_of(ids), *keys_of(ended)} & {*dropped}
            assert all(len(key) == 16 for key in dropped)
        assert [False] * 7 + [True] == tier.have_windows(ids)
        assert [False] * 6 + [True] * 2 == tier.have_windows(ended)
        assert 8 == load(tier, ids, *[LASTING] * 7, WHOLE).num_blocks
        with tier.view() as view:
            held = len(list(view.blocks()))
        assert held == tier.stats().num_blocks == sum(tier.held(keys_of(ids + ended))) + held - 16
        assert tier.stats().evicted == tier.stats().stored - held
    sound(tmp_path / "disk")


def test_a_kept_block_keeps_its_window(tmp_path):
    with closing(opened(tmp_path / "disk")) as tier:
        ids = blocks()
        store(tier, ids)
        tier.keep(keys_of(ids))
        for seed in range(1, 20):
            store(tier, blocks(seed))
        assert 4 == load(tier, ids, *[WHOLE] * 4).num_blocks


def test_what_removes_a_block_removes_its_window(tier):
    ids = blocks()
    for gone in (lambda: tier.discard(keys_of(ids)), lambda: tier.purge([SCOPE.root()])):
        store(tier, ids)
        tier.discard(windows_of(ids[:1]))
        assert 4 == tier.count([SCOPE.root()])
        gone()
        with tier.view() as view:
            assert {} == view.accounts()
            assert all(not shard.entries(None, 1) for shard in view.shards)
        assert 0 == tier.stats().logical_bytes


def test_commands_count_a_block_once_with_all_its_bytes(tmp_path):
    root = tmp_path / "disk"
    with closing(opened(root)) as tier:
        store(tier, blocks())
        tier.discard(windows_of(blocks()[:1]))
    with open_view(root) as view:
        found = {info.key: info.stored_bytes for info in view.blocks()}
        assert keys_of(blocks()[:1]) == [min(found, key=found.__getitem__)]
        assert sum(found.values()) == sum(entry.place.nbytes for entry in records(view))
        assert 4 == view.summary().num_blocks == len(found)
    with open_shards(root, readonly=False) as (_, [shard]):
        assert 1 == delete(shard, keys_of(blocks()[3:]))
        assert [] == shard.find(windows_of(blocks()[3:]))
    assert 3 == sound(root)


def records(view):
    return [entry for shard in view.shards for page in pages(shard) for _, entry in page]


@pytest.mark.parametrize("how", ["compact", "restart"])
def test_parts_survive_a_rewrite_and_a_restart(how, tmp_path):
    root = tmp_path / "disk"
    ids = blocks()
    tier = opened(root)
    store(tier, ids)
    tier.discard(windows_of(ids[:2]))
    tier.close()
    if how == "compact":
        with open_shards(root, readonly=False) as (_, [shard]):
            shard.give_back()
    assert 4 == sound(root)
    with closing(opened(root)) as tier:
        assert [False] * 2 + [True] * 2 == tier.have_windows(ids)
        assert 4 == load(tier, ids, LASTING, LASTING, WHOLE, WINDOW).num_blocks
        assert not tier.stats().faults


def test_a_store_below_gets_whole_records_or_what_there_is(tmp_path):
    objects, ids = Objects(), blocks()

    def server(name):
        disk = opened(tmp_path / name)
        return StackedTier(disk, RemoteTier(objects, LAYOUT, disk.read_record), RemoteWrites.ALL)

    with closing(server("one")) as one:
        store(one.disk, ids[:3])
        one.disk.discard(windows_of(ids[1:2]))
        assert 3 == one.publish(keys_of(ids[:3])).result(60)
    parts = [unpack_header(data) for data in objects.held.values()]
    assert {WHOLE, LASTING} == {each.part for each in parts if isinstance(each, Header)}
    with closing(server("two")) as two:
        assert [True] * 3 == two.have_windows(ids[:3]), "as far as is known"
        loaded = load(two, ids[:3], *[WHOLE] * 3)
        assert (1, MissReason.ABSENT) == (loaded.num_blocks, loaded.reason)
        assert (TierName.REMOTE,) == loaded.sources
        assert 3 == load(two, ids[:3], WINDOW, LASTING, WHOLE).num_blocks
        assert not two.remote.stats().faults
    assert 3 == len(objects.held)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_life_serves_no_wrong_byte(seed, tmp_path):
    """Random stores, loads, losses and restarts; every byte is compared, counts are conserved."""
    chance = random.Random(seed)
    tier, served = opened(tmp_path, capacity=2 * CAPACITY), 0
    for _ in range(150):
        ids = blocks(chance.randrange(12), count=8)[: chance.randint(1, 8)]
        act = chance.random()
        if act < 0.4:
            store(tier, ids)
        elif act < 0.8:
            parts = [chance.choice((WHOLE, LASTING, WINDOW)) for _ in ids]
            expected = tier.have_windows(ids), tier.probe(ids)
            num_loaded = load(tier, ids, *parts).num_blocks
            there = (
                number < expected[1] and (part is LASTING or expected[0][number])
                for number, part in enumerate(parts)
            )
            assert num_loaded == next((n for n, here in enumerate(there) if not here), len(ids))
            served += num_loaded
        elif act < 0.9:
            told = [chance.random() < 0.5 for _ in ids]
            tier.demoted(keys_of(ids), [0.0] * len(ids), told)
        elif act < 0.96:
            tier.discard(windows_of(ids))
        else:
            tier.close()
            assert sound(tmp_path) >= 0
            tier = opened(tmp_path, capacity=2 * CAPACITY)
    assert served > 60
    stats = tier.stats()
    assert not stats.faults and stats.evicted
    with tier.view() as view:
        assert stats.num_blocks == len(list(view.blocks()))
        assert stats.logical_bytes == sum(entry.logical_nbytes for entry in records(view))
    tier.close()
