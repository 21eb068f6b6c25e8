"""Looking into a disk tier, verifying it, moving its blocks, and letting them go."""

import os
from dataclasses import replace

import pytest

from tests.children import ran
from tests.support.disks import CAPACITY, FRAMES, Clock, blocks, closed_later, store
from tests.support.faulty_storage import LAYOUT, fetched
from tiers.blocks.keys import TOKEN_BYTES, CacheScope
from tiers.disk.format.codec import CodecId
from tiers.disk.format.record import unpack_header
from tiers.disk.inspection.view import open_view
from tiers.disk.open import open_disk
from tiers.disk.settings import DiskSettings
from tiers.disk.storage import PageBuffer, Storage
from tiers.errors import ConfigurationError
from tiers.tier import Loaded, TierName

OTHER = CacheScope(weights=b"tiny", tenant=b"other")


def opened(root, clock=None, capacity_bytes=CAPACITY, num_shards=1, storage=None, **settings):
    tier = open_disk(
        root,
        LAYOUT,
        capacity_bytes,
        num_shards=num_shards,
        settings=DiskSettings(**settings),
        storage=storage,
        clock=clock or Clock(),
        check_s=60,  # a busy machine is no reason to check a shard in another process
    )
    return closed_later(tier)


def load(tier, ids):
    return fetched(tier, ids, FRAMES).num_blocks


@pytest.fixture
def tier(tmp_path):
    return opened(tmp_path / "disk")


def test_raw_records_stand_beside_compressed_ones(tmp_path):
    codecs = []
    for seed, compresses in enumerate((True, False, True)):
        tier = opened(tmp_path, compresses=compresses)
        assert store(tier, blocks(seed)) == []
        assert [4] * (seed + 1) == [load(tier, blocks(each)) for each in range(seed + 1)]
        codecs.append(unpack_header(tier.read_record(blocks(seed)[0].key)[1]).codec)
        tier.close()
    assert [CodecId.PLANES32, CodecId.RAW, CodecId.PLANES32] == codecs


def test_a_view_lists_what_was_stored(tier):
    ids = blocks() + blocks(1, scope=OTHER)
    store(tier, ids)
    with tier.view() as view:
        listed = list(view.blocks())
        assert {block.key for block in ids} == {info.key for info in listed}
        assert sorted(info.key for info in listed) == [info.key for info in listed]
        assert {len(info.tokens) // TOKEN_BYTES for info in listed} == {16}
        assert sum(block.scope == OTHER.root() for block in view.blocks()) == 4
        (shown,) = [info for info in listed if info.parent == ids[1].key]
        assert (shown.key, shown.parent, shown.tokens) == ids[2][2:3] + ids[2][1:2] + ids[2][3:4]
        told = shown.view(shown.used_s + 5.0)
        assert ((TierName.DISK,), 0, 5.0) == (told.tiers, told.hits, told.idle_s)
        summary = view.summary()
        assert (summary.num_blocks, summary.num_scopes) == (8, 2)
        assert summary.logical_bytes == 8 * LAYOUT.nbytes
        assert summary.server is not None
        assert f"pid {os.getpid()}" in summary.server


def test_a_read_ends_where_the_file_does(tmp_path):
    held, storage, room = b"x" * 3 * 4096, Storage(), PageBuffer().take(4 * 4096)
    (tmp_path / "data").write_bytes(held)
    file = storage.open_file(tmp_path / "data")
    assert [len(held), 0] == [storage.read(file, room, at) for at in (0, len(held))]
    assert held == room[: len(held)]


BESIDE = """
import sys
import time
from pathlib import Path
from tiers.disk.inspection.maintenance import purge
from tiers.disk.inspection.opening import open_shards
from tiers.disk.inspection.verify import verify_all
from tiers.disk.inspection.view import open_view

root, scope = Path(sys.argv[1]), bytes.fromhex(sys.argv[2])
with open_view(root) as view:
    assert verify_all(view.shards).num_blocks == 8
    assert view.summary().server is not None
with open_shards(root, readonly=False) as (_, shards):
    assert purge(shards, [scope]).num_blocks == 4
assert "torch" not in sys.modules, "a look into a folder must not load torch"
"""


def test_another_process_reads_and_writes_beside_the_server(tier):
    """A command line lists, verifies and evicts while the server is open; the server sees it."""
    store(tier, blocks())
    store(tier, blocks(1, scope=OTHER))
    ran(BESIDE, tier.root, OTHER.root().hex())
    assert load(tier, blocks()) == 4
    assert tier.probe(blocks(1, scope=OTHER)) == 0
    store(tier, blocks(2))
    assert tier.stats().num_blocks == 8


def test_the_order_of_eviction_survives_a_restart(tmp_path):
    """A block that is hit now and then stays."""
    tier = opened(tmp_path)
    store(tier, blocks(0))
    for seed in range(1, 120):
        if seed % 20 == 0:
            tier.close()
            tier = opened(tmp_path)
        store(tier, blocks(seed))
        load(tier, blocks(0))
    assert tier.probe(blocks(0)) == 4
    assert tier.probe(blocks(1)) < 4


def test_records_lie_side_by_side_and_are_read_by_offset(tier):
    """Every record has an extent, and neighbours of a prefix are neighbours on the disk."""
    store(tier, blocks(0, count=16))
    with tier.view() as view:
        entries = view.shards[0].find([block.key for block in blocks(0, count=16)])
        assert all(entry.place.offset % 4096 == 16 for entry in entries)
        ends = [(e.place.offset - 16) + -(-(e.place.nbytes + 16) // 4096) * 4096 for e in entries]
        gaps = [e.place.offset - 16 - end for e, end in zip(entries[1:], ends, strict=False)]
        assert gaps.count(0) >= 8
    assert load(tier, blocks(0, count=16)) == 16


def test_a_record_without_an_extent_is_read_through_lmdb(tier, monkeypatch):
    """Should LMDB's page layout change, the offset is unknown and the value is fetched instead."""
    monkeypatch.setattr("tiers.disk.transaction._OVERFLOW", 0x8000)
    store(tier, blocks())
    monkeypatch.undo()
    with tier.view() as view:
        assert view.shards[0].find([blocks()[0].key])[0].place.offset == 0
    assert tier.load(blocks(), FRAMES[:4]) == Loaded(4, None)
    assert load(tier, blocks()) == 4


def test_opening_reads_no_blocks(tmp_path):
    """Start-up does not scan: the storage operations of an open do not grow with the blocks."""
    counts = []
    for num_chains in (1, 50):
        root = tmp_path / str(num_chains)
        tier = opened(root, capacity_bytes=4 << 20)
        for seed in range(num_chains):
            store(tier, blocks(seed))
        tier.close()

        class Counting(Storage):
            num = 0

            def before(self, operation):
                Counting.num += 1

        open_disk(root, LAYOUT, 4 << 20, storage=Counting()).close()
        counts.append(Counting.num)
    assert counts[0] == counts[1]


def test_a_folder_of_another_format_is_not_looked_into(tier, tmp_path):
    meta = tmp_path / "disk" / "disk.json"
    meta.write_text(meta.read_text().replace('"format": 3', '"format": 4'))
    with (
        pytest.raises(ConfigurationError, match="is of format 4, and this version reads 3"),
        open_view(tmp_path / "disk"),
    ):
        pass


def test_blocks_of_another_size_are_announced_once_and_not_served(tmp_path, caplog):
    tier = opened(tmp_path)
    store(tier, blocks())
    tier.close()
    longer = replace(LAYOUT, block_size=2 * LAYOUT.block_size)
    for expected in (["last served in blocks of 16 tokens, now of 32"], []):
        caplog.clear()
        open_disk(tmp_path, longer, 8 << 20, check_s=60).close()
        said = [entry.message for entry in caplog.records if "of another size" in entry.message]
        assert len(expected) == len(said)
        assert all(text in line for text, line in zip(expected, said, strict=True))
    tier = opened(tmp_path)
    assert 4 == load(tier, blocks())
