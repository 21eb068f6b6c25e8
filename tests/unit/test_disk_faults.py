"""Whatever fails under the disk tier is a counted miss: never an exception, never wrong bytes."""

import errno
import logging
import os
import resource
import shutil
import signal
import threading

import lmdb
import pytest

from cachesvc.config.quantities import parse_size
from tests.children import in_child
from tests.support.disks import CAPACITY, FRAMES, blocks, closed_later, load, store
from tests.support.faulty_storage import (
    LAYOUT,
    FaultyStorage,
    LyingStorage,
    disk_full,
    io_error,
    map_full,
)
from tiers.blocks.layout import BlockLayout
from tiers.disk.directory import FORMAT, LOCK_NAME, DirectoryLock, is_locked, read_meta, write_meta
from tiers.disk.open import open_disk
from tiers.disk.storage import DataFile, Storage
from tiers.errors import ConfigurationError, DirectoryLocked, MissReason
from tiers.tier import Loaded


def opened(root, storage=None, layout=LAYOUT):
    return closed_later(open_disk(root, layout, CAPACITY, storage=storage))


def flip(path, offset, bit=0):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def record_offset(tier, block):
    with tier._slots[0].use() as shard:
        return shard.find([block.key])[0].place.offset


@pytest.mark.parametrize("error", [io_error, disk_full, map_full, lmdb.PanicError])
def test_the_nth_operation_fails(tmp_path, error):
    """For N = 1, 2, 3, ... until nothing fails: no exception, no wrong byte, usable afterwards."""
    number = 0
    while True:
        number += 1
        storage = FaultyStorage(error=error)
        tier = opened(tmp_path / str(number), storage)
        old, new = blocks(1, 2), blocks(2, 3)
        store(tier, old)
        storage.arm(number)
        load(tier, old)
        store(tier, new)
        load(tier, new)
        tier.discard([old[0].key])
        tier.flush()
        tier.probe(old)
        tier.stats()
        failed = storage.num_failed
        storage.arm(0)
        store(tier, new)
        assert load(tier, new) == Loaded(3, None), f"not usable after failure {number}"
        if failed and storage.num_failed == failed:
            assert tier.probe(blocks(9, 1)) == 0
        tier.close()
        shutil.rmtree(tmp_path / str(number))
        if not failed:
            break
    assert number > 40, "the operations that can fail were not reached"


@pytest.mark.parametrize("operation", ["begin_write", "put", "commit", "begin_read", "read", "get"])
def test_a_disk_that_always_fails_is_only_misses(tmp_path, operation):
    """Reads that always fail, writes that always fail: counted, and over when the fault is."""
    storage = FaultyStorage()
    tier = opened(tmp_path, storage)
    ids = blocks()
    store(tier, ids)
    storage.arm(1, count=10_000, operations=[operation])
    load(tier, ids)
    store(tier, blocks(seed=2))
    load(tier, blocks(seed=2))
    assert tier.stats().faults[MissReason.IO_ERROR] > 0
    storage.arm(0)
    store(tier, ids)
    assert load(tier, ids) == Loaded(4, None)


def test_every_field_of_a_record_is_guarded(tmp_path):
    """One changed bit anywhere in header or payload is a miss, counted, and healed by a store."""
    lying = LyingStorage()
    tier = opened(tmp_path, lying)
    ids = blocks(count=1)
    store(tier, ids)
    nbytes = tier.stats().read_bytes
    load(tier, ids)
    nbytes = tier.stats().read_bytes - nbytes
    misses = 0
    for at in [*range(0, 260, 3), *range(260, nbytes, 97)]:
        lying.flip = at * 8 + at % 8
        loaded = load(tier, ids)
        lying.flip = None
        if loaded.num_blocks == 0:
            misses += 1
            assert loaded.reason in (MissReason.CHECKSUM, MissReason.VERSION, MissReason.TORN)
            assert tier.probe(ids) == 1
        tier.flush()
        if loaded.num_blocks == 0:
            assert tier.probe(ids) == 0, "an unreadable record is deleted by the next write"
            store(tier, ids)
    assert sum(tier.stats().faults.values()) == misses > 100


@pytest.mark.parametrize("cut", [4096, 7000])
def test_a_torn_record_is_a_miss(tmp_path, cut):
    lying = LyingStorage()
    tier = opened(tmp_path, lying)
    store(tier, blocks())
    lying.cut = cut
    assert load(tier, blocks()) == Loaded(0, MissReason.TORN)


@pytest.mark.parametrize("harm", ["truncate", "delete file", "delete folder"])
def test_a_shard_harmed_under_us_is_replaced(tmp_path, harm):
    """A file cut short or removed by someone else costs its blocks and nothing more."""
    tier = opened(tmp_path)
    store(tier, blocks())
    path = tmp_path / "shard-000" / "data.mdb"
    if harm == "truncate":
        os.truncate(path, 12_288)
    elif harm == "delete file":
        path.unlink()
    else:
        shutil.rmtree(path.parent)
    assert load(tier, blocks()) == Loaded(0, MissReason.IO_ERROR)
    assert tier.probe(blocks()) == 0
    store(tier, blocks(seed=3))
    assert load(tier, blocks(seed=3)) == Loaded(4, None)
    assert path.exists()


@pytest.mark.parametrize("nbytes", [0, 100, 4096, 8192, 40_960])
def test_a_shard_cut_while_closed_is_dropped(tmp_path, nbytes):
    tier = opened(tmp_path)
    store(tier, blocks())
    tier.close()
    os.truncate(tmp_path / "shard-000" / "data.mdb", nbytes)
    tier = opened(tmp_path)
    assert load(tier, blocks()) == Loaded(0, MissReason.ABSENT)
    store(tier, blocks())
    assert load(tier, blocks()) == Loaded(4, None)


def test_another_format_version_is_cleared_and_counted(tmp_path):
    tier = opened(tmp_path)
    store(tier, blocks())
    tier.close()
    meta = read_meta(tmp_path)
    assert meta.num_blocks == 4
    write_meta(tmp_path, type(meta)(FORMAT + 1, meta.num_shards, meta.map_bytes, num_blocks=4))
    tier = opened(tmp_path)
    assert tier.stats().faults == {MissReason.VERSION: 4}
    assert load(tier, blocks()) == Loaded(0, MissReason.ABSENT)


def test_another_layout_is_never_served(tmp_path):
    """The same bytes a block, differently shaped: the record says so and is a miss."""
    tier = opened(tmp_path)
    store(tier, blocks())
    tier.close()
    other = BlockLayout.uniform(
        num_layers=2, block_size=16, num_kv_heads=1, head_dim=32, dtype="float32"
    )
    assert other.nbytes == LAYOUT.nbytes
    tier = opened(tmp_path, layout=other)
    assert tier.load(blocks(), FRAMES[:4]) == Loaded(0, MissReason.LAYOUT)


def test_a_second_server_is_refused_and_told_of_the_first(tmp_path):
    tier = opened(tmp_path)
    with pytest.raises(DirectoryLocked, match=f"pid {os.getpid()} on "):
        opened(tmp_path)
    tier.close()
    opened(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="choose another --data-dir"):
        opened(tmp_path / "file" / "cache")


def test_a_capacity_too_small_says_what_would_do(tmp_path):
    with pytest.raises(ConfigurationError, match="give it ") as refused:
        open_disk(tmp_path, LAYOUT, 100_000)
    enough = parse_size(str(refused.value).split("give it ")[1].split()[0])
    tier = closed_later(open_disk(tmp_path, LAYOUT, enough))
    store(tier, blocks())
    assert load(tier, blocks()) == Loaded(4, None)


class RacingStorage(Storage):
    """Does something else just before the next record is read."""

    def __init__(self):
        self.meanwhile = None

    def before(self, operation):
        if operation == "read" and self.meanwhile is not None:
            work, self.meanwhile = self.meanwhile, None
            work()


def test_a_block_evicted_while_it_is_read_is_absent(tmp_path):
    """Between index and record the pages got another block: no fault, no condemnation."""
    racing = RacingStorage()
    tier = opened(tmp_path, racing)
    ids = blocks()
    store(tier, ids)

    def reuse():
        tier.discard([block.key for block in ids])
        for seed in range(100, 130):
            store(tier, blocks(seed=seed))

    racing.meanwhile = reuse
    assert tier.load(ids, FRAMES[:4]) == Loaded(0, MissReason.ABSENT)
    assert not tier.stats().faults


def test_a_condemned_record_is_deleted_though_a_write_fails_between(tmp_path):
    storage = FaultyStorage()
    tier = opened(tmp_path, storage)
    ids = blocks(count=1)
    store(tier, ids)
    flip(tmp_path / "shard-000" / "data.mdb", record_offset(tier, ids[0]) + 2000)
    assert load(tier, ids) == Loaded(0, MissReason.CHECKSUM)
    storage.arm(1, operations=["commit"])
    tier.flush()
    store(tier, ids)
    assert load(tier, ids) == Loaded(1, None)


def test_close_waits_for_a_reader(tmp_path):
    """LMDB's map must not be closed while a reader uses it."""
    racing = RacingStorage()
    tier = opened(tmp_path, racing)
    store(tier, blocks())
    closer = threading.Thread(target=tier.close)
    alive = []

    def close_meanwhile():
        closer.start()
        closer.join(0.2)
        alive.append(closer.is_alive())

    racing.meanwhile = close_meanwhile
    tier.load(blocks(), FRAMES[:4])
    closer.join()
    assert alive == [True]


class CachedOnly(Storage):
    """A file system without direct reads, as tmpfs was."""

    def open_file(self, path):
        return DataFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC), None)


def test_a_file_system_without_direct_reads_will_do(tmp_path):
    tier = opened(tmp_path, CachedOnly())
    store(tier, blocks())
    assert load(tier, blocks()) == Loaded(4, None)


def write_beyond_the_limit(root):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    tier = opened(root)
    store(tier, blocks())
    size = (root / "shard-000" / "data.mdb").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    for seed in range(50, 60):
        store(tier, blocks(seed=seed))
    assert tier.stats().faults[MissReason.IO_ERROR] > 0
    assert load(tier, blocks()) == Loaded(4, None)


def test_a_disk_that_is_really_full(tmp_path):
    """The system itself refuses to let the file grow: counted, and served from what is there."""
    assert in_child(write_beyond_the_limit, tmp_path) == 0
    tier = opened(tmp_path)
    assert load(tier, blocks()) == Loaded(4, None)
    store(tier, blocks(seed=3))
    assert load(tier, blocks(seed=3)) == Loaded(4, None)


def test_a_directory_that_turns_read_only_is_counted(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    storage = FaultyStorage(error=lambda: OSError(30, "Read-only file system"))
    tier = opened(tmp_path, storage)
    store(tier, blocks())
    storage.arm(1, count=100, operations=["commit", "sync"])
    store(tier, blocks(seed=2))
    assert load(tier, blocks()) == Loaded(4, None)
    assert tier.stats().faults[MissReason.IO_ERROR] == 4
    store(tier, blocks(seed=2))
    assert {"[Errno 30] Read-only file system"} == failing(tier)
    assert "takes blocks again" not in caplog.text
    storage.arm(0)
    tier.discard([blocks()[0].key])  # a commit that stores nothing passes on a full disk too
    assert {""} != failing(tier)
    assert "takes blocks again" not in caplog.text
    store(tier, blocks(seed=3))
    assert {""} == failing(tier)
    assert f"{tmp_path / 'shard-000'} takes blocks again" in caplog.text
    tier.flush()


def test_a_capacity_beyond_the_address_space_names_its_option(tmp_path):
    with pytest.raises(ConfigurationError, match="Cannot allocate memory; lower --disk-cache"):
        open_disk(tmp_path, LAYOUT, 1 << 50)
    with pytest.raises(ConfigurationError, match="Invalid argument; mend that, or move"):
        opened(
            tmp_path, FaultyStorage(1, error=lambda: lmdb.InvalidParameterError("Invalid argument"))
        )


def test_a_full_disk_is_said_where_lmdb_says_input_output_error(tmp_path, monkeypatch, caplog):
    storage = FaultyStorage()
    tier = opened(tmp_path, storage)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 4096))
    storage.arm(1, count=100, operations=["commit"])
    for seed in (2, 3):
        store(tier, blocks(seed=seed))
    [said] = failing(tier)
    assert said.endswith("Input/output error; its file system is full")
    assert said in caplog.text
    storage.arm(0)


def failing(tier):
    return {shard.failing for shard in tier.stats().shards}


def test_a_folder_on_a_failed_disk_is_closed(tmp_path, monkeypatch):
    """A read-only file system also refuses to empty the file of the lock."""
    lock = DirectoryLock(tmp_path)
    with (tmp_path / LOCK_NAME).open() as read_only:
        monkeypatch.setattr(lock, "_file", Failing(lock._file))
        lock.release()
        assert not is_locked(tmp_path)
        assert read_only.read().startswith("pid"), "the name could not be removed"


class Failing:
    """A file on a file system that became read-only."""

    def __init__(self, file):
        self.close = file.close

    def truncate(self, _):
        raise OSError(errno.EROFS, "Read-only file system")
