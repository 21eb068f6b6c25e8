"""Several disks as one tier: blocks are spread, and disks fail alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.operator.purge import purge_stopped
from tiers.blocks.frames import FrameArena
from tiers.blocks.keys import BlockId
from tiers.blocks.layout import BlockLayout
from tiers.disk.array import DiskArray, open_array
from tiers.disk.directory import note_elsewhere
from tiers.disk.open import open_disk
from tiers.disk.tier import DiskTier
from tiers.errors import ConfigurationError, DirectoryLocked, MissReason
from tiers.testing.faulty_storage import (
    SCOPE,
    FaultyStorage,
    chain,
    fill,
    holds,
    take,
    wipe,
)
from tiers.tier import Loaded

LAYOUT = BlockLayout.uniform(
    num_layers=1, block_size=16, num_kv_heads=2, head_dim=16, dtype="float32"
)
FRAMES = take(FrameArena(LAYOUT, 17), 17)
IDS = chain(16, block_size=16)


def opened(root: Path, *names: str, bad: FaultyStorage | None = None) -> DiskArray:
    """Disks in these folders; the last one over `bad`."""

    def open_one(folder: Path) -> DiskTier:
        return open_disk(folder, LAYOUT, 2 << 20, storage=bad if folder.name == names[-1] else None)

    return open_array([root / name for name in names], open_one)


@pytest.fixture
def array(tmp_path: Path) -> Iterator[DiskArray]:
    array = opened(tmp_path, "a", "b", "c")
    yield array
    array.close()


def store(array: DiskArray, ids: list[BlockId] = IDS) -> list[bytes]:
    for frame, block in zip(FRAMES, ids, strict=False):
        fill(frame, block)
    return list(array.store(ids, FRAMES[: len(ids)]))


def load(array: DiskArray, ids: list[BlockId] = IDS) -> Loaded:
    wipe(FRAMES)
    loaded = array.load(ids, FRAMES[: len(ids)])
    for frame, block in zip(FRAMES[: loaded.num_blocks], ids, strict=False):
        assert holds(frame, block, FRAMES[16])
    return loaded


def test_blocks_are_spread_over_the_disks_and_found_again(tmp_path: Path) -> None:
    array = opened(tmp_path, "a", "b", "c")
    assert store(array) == []
    assert array.probe(IDS) == 16
    assert load(array) == Loaded(16, None)
    stats = array.stats()
    assert (stats.num_blocks, stats.hits, stats.capacity_bytes) == (16, 16, 6 << 20)
    assert len({array.disk_of(block.key) for block in IDS}) == 3
    assert [shard.name for shard in stats.shards] == [f"disk-{n}/shard-000" for n in range(3)]
    array.close()
    array = opened(tmp_path, "c", "a", "b")
    assert load(array) == Loaded(16, None), "the order of the folders does not matter"
    array.close()


def test_a_disk_more_moves_its_part_of_the_keys_only(tmp_path: Path) -> None:
    two = opened(tmp_path, "a", "b")
    before = {block.key: two.disk_of(block.key) for block in chain(300, block_size=16)}
    two.close()
    three = opened(tmp_path, "a", "b", "c")
    moved = [key for key, root in before.items() if three.disk_of(key) != root]
    assert {three.disk_of(key) for key in moved} == {tmp_path / "c"}
    assert 60 < len(moved) < 140
    three.close()


def test_a_disk_that_fails_costs_its_blocks_only(tmp_path: Path) -> None:
    """Its blocks are misses and refused; the others are served, and new ones stored."""
    bad = FaultyStorage()
    array = opened(tmp_path, "a", "b", "c", bad=bad)
    assert store(array) == []
    lost = {block.key for block in IDS if array.disk_of(block.key).name == "c"}
    bad.arm(1, count=100_000)
    loaded = load(array)
    first = next(at for at, block in enumerate(IDS) if block.key in lost)
    assert loaded == Loaded(first, MissReason.IO_ERROR)
    for block in IDS:
        assert load(array, [block]).num_blocks == (block.key not in lost)
    more = chain(16, block_size=16, seed=1)
    refused = set(store(array, more))
    assert refused == {block.key for block in more if array.disk_of(block.key).name == "c"}
    bad.arm(0)
    array.flush()
    assert load(array) == Loaded(16, None)
    array.close()


def test_a_disk_that_does_not_open_is_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("no folder")
    array = opened(tmp_path, "a", "b", "c")
    refused = store(array)
    mine = {block.key for block in IDS if array.disk_of(block.key).name == "c"}
    assert set(refused) == mine
    assert [shard.ready for shard in array.stats().shards] == [True, True, False]
    assert sum(array.held([block.key for block in IDS])) == 16 - len(mine)
    with pytest.raises(ConfigurationError, match="cannot be reached"):
        array.purge([SCOPE.root()])
    array.close()


def test_what_operators_ask_reaches_every_disk(array: DiskArray) -> None:
    store(array)
    assert array.count([SCOPE.root()]) == 16
    assert array.discard([block.key for block in IDS[8:]]) == 8
    with array.view() as view:
        assert view.verify().num_blocks == 8
    assert array.trace(IDS[0].key) == IDS[0]
    assert array.purge([SCOPE.root()]).num_blocks == 8
    assert array.probe(IDS) == 0


def test_folders_that_cannot_work_are_refused(tmp_path: Path, array: DiskArray) -> None:
    with pytest.raises(DirectoryLocked):
        opened(tmp_path, "d", "a")
    with pytest.raises(ConfigurationError, match="named twice"):
        opened(tmp_path, "d", "d")
    (tmp_path / "e").write_text("")
    with pytest.raises(ConfigurationError, match="none of the disk caches opens"):
        opened(tmp_path, "e")
    opened(tmp_path, "d").close()


def test_a_purge_without_the_server_says_where_else_blocks_are(tmp_path: Path) -> None:
    opened(tmp_path, "disk").close()
    note_elsewhere(tmp_path / "disk", ["/mnt/two", "redis://host:1/0"])
    with pytest.raises(ConfigurationError, match="/mnt/two, redis://host:1/0 too; start the"):
        purge_stopped(tmp_path, [SCOPE.root()])
    note_elsewhere(tmp_path / "disk", [])
    assert purge_stopped(tmp_path, [SCOPE.root()]).num_left == 0
