"""A disk tier within its bounds: compacted, opened with less or more, and beside a slow reader."""

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_disk_ops import CAPACITY, blocks, load, opened, store
from tiers.blocks.keys import PrefixKey
from tiers.disk.directory import read_meta, shard_path
from tiers.disk.inspection.compact import compact_folder
from tiers.disk.inspection.verify import verify_all
from tiers.disk.inspection.view import DiskView, open_view
from tiers.disk.open import shard_map_bytes
from tiers.disk.pin_file import save_pins
from tiers.disk.shard import Shard
from tiers.disk.storage import LOCK_BYTES
from tiers.errors import ConfigurationError, MissReason
from tiers.policy.retention import Pin


def num_stored(view: DiskView) -> int:
    return sum(day.num_stored for shard in view.shards for day in shard.days().values())


def test_compaction_keeps_blocks_and_their_order(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    for seed in range(40):
        store(tier, blocks(seed))
    for seed in range(0, 40, 2):
        tier.discard([block.key for block in blocks(seed)])
    tier.close()
    with open_view(tmp_path) as view:
        before = [info.key for info in view.blocks(oldest=True)]
        stored = num_stored(view)
    (done,) = compact_folder(tmp_path)
    assert (done.num_kept, done.num_dropped) == (len(before), 0)
    assert done.file_bytes < done.file_bytes_before
    with open_view(tmp_path) as view:
        assert [info.key for info in view.blocks(oldest=True)] == before
        assert verify_all(view.shards).sound
        assert num_stored(view) == stored == 160
    tier = opened(tmp_path)
    assert load(tier, blocks(39)) == 4
    assert store(tier, blocks(41)) == []
    with tier.view() as view:
        newest = [info.key for info in view.blocks(oldest=True)][-4:]
    assert set(newest) == {block.key for block in blocks(41)}
    tier.close()


def test_a_command_that_reads_during_the_swap_keeps_no_page_of_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens the old file after its lock file has gone, and stays in a read transaction."""
    tier = opened(tmp_path)
    for seed in range(60):
        store(tier, blocks(seed))
    tier.close()
    reads = (
        "import lmdb, sys; env = lmdb.open(sys.argv[1], readonly=True); txn = env.begin(); "
        "print(flush=True); sys.stdin.read()"
    )
    command, pipe = [sys.executable, "-c", reads, str(shard_path(tmp_path, 0))], subprocess.PIPE
    with contextlib.ExitStack() as stack:
        replace = Path.replace

        def read_and_replace(path: Path, target: Path) -> Path:
            if path.name == "data.mdb":
                reader = subprocess.Popen(command, stdin=pipe, stdout=pipe)
                stack.enter_context(reader)
                assert reader.stdout is not None
                reader.stdout.readline()
            return replace(path, target)

        monkeypatch.setattr(Path, "replace", read_and_replace)
        compact_folder(tmp_path)
        monkeypatch.undo()
        tier = opened(tmp_path)
        for seed in range(100, 160):
            store(tier, blocks(seed))
        assert tier.stats().faults == {}
        assert load(tier, blocks(159)) == 4
        tier.close()


def test_the_lock_file_of_a_shard_has_its_room(tmp_path: Path) -> None:
    """LMDB writes into its mapping: where the disk had none left, the process ended by SIGBUS."""
    opened(tmp_path).close()
    status = (shard_path(tmp_path, 0) / "lock.mdb").stat()
    assert status.st_size >= LOCK_BYTES
    assert status.st_blocks * 512 >= status.st_size


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_shard_without_room_for_its_lock_file_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fallocate(file: int, offset: int, length: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(OSError, match=os.strerror(code)):
        opened(tmp_path)
    monkeypatch.undo()
    opened(tmp_path).close()


def test_a_lowered_capacity_keeps_the_newest(tmp_path: Path) -> None:
    tier = opened(tmp_path, capacity_bytes=4 << 20)
    for seed in range(100):
        store(tier, blocks(seed))
    tier.close()
    tier = opened(tmp_path, capacity_bytes=CAPACITY)
    stats = tier.stats()
    assert stats.used_bytes <= CAPACITY
    assert stats.num_blocks > 60
    assert not stats.faults
    assert load(tier, blocks(99)) == 4
    assert tier.probe(blocks(0)) == 0
    tier.close()


def test_a_lowered_capacity_drops_others_before_pinned_blocks(tmp_path: Path) -> None:
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
    tier.close()


def test_a_raised_capacity_is_used(tmp_path: Path) -> None:
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
    assert meta is not None
    assert meta.map_bytes > CAPACITY
    tier.close()


def test_a_reader_left_open_does_not_break_the_bound(tmp_path: Path) -> None:
    """A stuck reader keeps freed pages from reuse: blocks are refused and counted, no byte more."""
    tier = opened(tmp_path)
    with tier.view() as view:
        shard: Shard = view.shards[0]
        with shard._reading():
            for seed in range(120):
                store(tier, blocks(seed))
            assert tier.stats().used_bytes <= CAPACITY
            assert tier.stats().faults[MissReason.NO_ROOM] > 0
    for seed in range(200, 204):
        store(tier, blocks(seed))
    assert load(tier, blocks(203)) == 4
    tier.close()


def test_a_shard_that_lmdb_cannot_open_is_named_and_kept(tmp_path: Path) -> None:
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
    tier.close()


def test_a_disk_that_is_too_small_says_so_in_sizes_as_people_write_them() -> None:
    with pytest.raises(ConfigurationError, match=r"a disk cache of 0.5 MiB .* give it \d+MiB"):
        shard_map_bytes(1 << 19, 2, 46080 * 64)
