"""A disk tier within its bounds: compacted, opened with less or more, and beside a slow reader."""

import errno
import os
from unittest.mock import Mock

import pytest

from tests.support.disks import CAPACITY, blocks, oldest_first, store
from tests.unit.test_disk_ops import load, opened
from tiers.blocks.keys import PrefixKey
from tiers.disk.directory import read_meta, shard_path
from tiers.disk.inspection.verify import verify_all
from tiers.disk.pin_file import save_pins
from tiers.disk.room import RELIEF_COMMITS, allowed, reserve_of
from tiers.disk.storage import LOCK_BYTES, FileSystem, Storage
from tiers.errors import ConfigurationError, MissReason
from tiers.policy.retention import Pin


def given_back(shard):
    """Pages that the last commits freed, too."""
    for _ in range(RELIEF_COMMITS):
        with shard.writing():
            pass
    shard.give_back()


def test_free_space_is_given_back_and_blocks_and_their_order_stay(tmp_path):
    tier = opened(tmp_path)
    for seed in range(40):
        store(tier, blocks(seed))
    tier.discard([block.key for seed in range(0, 40, 2) for block in blocks(seed)])
    with tier.view() as view:
        (shard,) = view.shards
        before, held = oldest_first(shard), shard.file_bytes()
        given_back(shard)
        assert oldest_first(shard) == before
        holds = shard.file_bytes()
        assert verify_all(view.shards).sound
    assert holds < 0.7 * held
    assert load(tier, blocks(39)) == 4
    for seed in range(41, 80):
        store(tier, blocks(seed))
    tier.close()
    tier = opened(tmp_path)
    assert {} == tier.stats().faults
    assert load(tier, blocks(79)) == 4


def test_pages_that_a_reader_sees_are_not_given_back(tmp_path):
    tier = opened(tmp_path)
    for seed in range(20):
        store(tier, blocks(seed))
    with tier.view() as view:
        shard = view.shards[0]
        with shard._reading() as snapshot:
            kept = dict(snapshot.rows("data"))
            tier.discard([block.key for seed in range(20) for block in blocks(seed)])
            given_back(shard)
            assert kept == dict(snapshot.rows("data"))
        before = shard.file_bytes()
        given_back(shard)
        assert shard.file_bytes() < before / 4


def test_the_lock_file_of_a_shard_has_its_room(tmp_path):
    """LMDB writes into its mapping: where the disk had none left, the process ended by SIGBUS."""
    opened(tmp_path).close()
    status = (shard_path(tmp_path, 0) / "lock.mdb").stat()
    assert status.st_size >= LOCK_BYTES
    assert status.st_blocks * 512 >= status.st_size


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_shard_without_room_for_its_lock_file_is_not_opened(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(code, os.strerror(code))))
    with pytest.raises(OSError, match=os.strerror(code)):
        opened(tmp_path)
    monkeypatch.undo()
    opened(tmp_path).close()


def test_a_lowered_capacity_drops_others_before_pinned_blocks(tmp_path):
    tier = opened(tmp_path, capacity_bytes=4 << 20)
    for seed in range(100):
        store(tier, blocks(seed))
    tier.close()
    kept, over = ([PrefixKey(block.key) for block in blocks(seed)] for seed in (0, 1))
    now_s = 1_000_000.0
    save_pins(
        tmp_path,
        [
            Pin(name="system", keys=tuple(kept), until_s=now_s + 3600),
            Pin(name="last year", keys=tuple(over), until_s=now_s - 1),
        ],
    )
    tier = opened(tmp_path, lambda: now_s, capacity_bytes=CAPACITY)
    stats = tier.stats()
    assert stats.used_bytes <= CAPACITY and stats.num_blocks > 60
    assert load(tier, blocks(0)) == 4
    assert load(tier, blocks(99)) == 4
    assert (tier.probe(blocks(1)), tier.probe(blocks(2))) == (0, 0)
    with tier.view() as view:
        assert verify_all(view.shards).sound
    store(tier, blocks(200))
    assert load(tier, blocks(200)) == 4


def test_a_raised_capacity_is_used(tmp_path):
    tier = opened(tmp_path)
    for seed in range(60):
        store(tier, blocks(seed))
    assert tier.stats().evicted > 0
    tier.close()
    tier = opened(tmp_path, capacity_bytes=4 * CAPACITY)
    for seed in range(100, 160):
        store(tier, blocks(seed))
    assert tier.stats().evicted == 0
    meta = read_meta(tmp_path)
    assert meta.map_bytes > CAPACITY


def test_a_reader_left_open_does_not_break_the_bound(tmp_path):
    """A stuck reader keeps freed pages from reuse: blocks are refused and counted, no byte more."""
    tier = opened(tmp_path)
    with tier.view() as view:
        shard = view.shards[0]
        with shard._reading():
            for seed in range(120):
                store(tier, blocks(seed))
            assert tier.stats().used_bytes <= CAPACITY
            assert tier.stats().faults[MissReason.NO_ROOM] > 0
    for seed in range(200, 204):
        store(tier, blocks(seed))
    assert load(tier, blocks(203)) == 4


def test_a_shard_that_lmdb_cannot_open_is_named_and_kept(tmp_path):
    tier = opened(tmp_path)
    store(tier, blocks(1))
    tier.close()
    lock = tmp_path / "shard-000" / "lock.mdb"
    lock.unlink()
    lock.mkdir()
    with pytest.raises(ConfigurationError, match=r"shard-000: Is a directory; mend that"):
        opened(tmp_path)
    lock.rmdir()
    tier = opened(tmp_path)
    assert 4 == load(tier, blocks(1))


GIB = 1 << 30


@pytest.mark.parametrize(
    ("total", "reserve"),
    [
        (220 << 20, 55 << 20),
        (2 * GIB, GIB // 2),
        (10 * GIB, GIB),
        (100 * GIB, 5 * GIB),
        (2000 * GIB, 16 * GIB),
    ],
)
def test_the_reserve_follows_the_size_of_the_file_system(total, reserve):
    assert reserve == reserve_of(None, total)
    assert 0 == reserve_of(0, total), "a setting wins"


@pytest.mark.parametrize(
    ("free", "failed", "may"),
    [
        (300, False, 700),  # room for 200 more
        (100, False, 500),  # the reserve, exactly
        (60, False, 450),  # half of it or more: as before
        (49, False, 449),  # less: until it is whole
        (0, False, 400),
        (100, True, 469),  # a quota: a sixteenth
        (0, True, 400),
    ],
)
def test_what_files_may_take_has_two_borders(free, failed, may):
    assert may == allowed(500, 450, FileSystem(1000, free), 100, failed=failed)


class OtherDisk(Storage):
    """A file system of which others leave so much free, beside this tier."""

    def __init__(self, root, free):
        self.root, self.free = root, free

    def file_system(self, path):
        held = sum(file.stat().st_blocks * 512 for file in self.root.rglob("data.mdb"))
        return FileSystem(64 << 19, self.free - held)


def test_others_that_fill_the_disk_get_room_and_leave_it_again(tmp_path):
    disk = OtherDisk(tmp_path, 24 << 19)  # of which a quarter of 32 MiB is the reserve
    tier = opened(tmp_path, storage=disk, capacity_bytes=32 << 19)

    def fill(first):
        for seed in range(first, first + 300):
            store(tier, blocks(seed))
        assert load(tier, blocks(first + 299)) == 4
        stats = tier.stats()
        assert stats.used_bytes <= stats.capacity_bytes <= stats.setting_bytes == 32 << 19
        assert not stats.faults
        return stats.used_bytes, disk.file_system(tmp_path).free

    used, free = fill(0)
    assert 6 << 19 < used <= 8 << 19 and free >= 16 << 19
    assert "the file system of" in tier.stats().limit
    disk.free = 14 << 19
    tier.flush()  # as the writer does when it is idle
    used, free = tier.stats().used_bytes, disk.file_system(tmp_path).free
    assert used <= 2 << 19 and free >= 12 << 19
    disk.free = 64 << 19
    used, free = fill(1000)
    assert used > 20 << 19 and not tier.stats().limit
    disk.free = 30 << 19
    used, free = fill(2000)
    assert used <= 14 << 19 and free >= 8 << 19
    with tier.view() as view:
        assert verify_all(view.shards).sound


class Unwilling(OtherDisk):
    """One that cannot take back parts of a file, as some network mounts."""

    def punch(self, path, spans):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_a_shard_that_cannot_shrink_is_emptied(tmp_path):
    disk = Unwilling(tmp_path, 40 << 19)
    tier = opened(tmp_path, storage=disk, capacity_bytes=32 << 19)
    for seed in range(300):
        store(tier, blocks(seed))
    assert tier.stats().used_bytes > 4 << 19
    disk.free = 10 << 19
    tier.flush()
    assert tier.stats().used_bytes < 1 << 19
    store(tier, blocks(900))
    assert load(tier, blocks(900)) == 4


def test_fewer_shards_are_opened_where_the_capacity_is_too_small_for_more(tmp_path):
    tier = opened(tmp_path, num_shards=4, capacity_bytes=8 << 20)
    store(tier, blocks(0))
    tier.close()
    tier = opened(tmp_path, capacity_bytes=1 << 20)
    assert 1 == len(tier.stats().shards)
    store(tier, blocks(0))
    assert load(tier, blocks(0)) == 4
