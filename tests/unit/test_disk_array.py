"""Several disks as one tier: blocks are spread, and disks fail alone."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.operator.purge import purge_stopped, purge_unserved
from tests.support.faulty_storage import (
    SCOPE,
    FaultyStorage,
    chain,
    fill,
    holds,
    take,
    wipe,
)
from tiers.blocks.frames import FrameArena
from tiers.blocks.keys import BlockId
from tiers.blocks.layout import BlockLayout
from tiers.disk.array import DiskArray, open_array
from tiers.disk.directory import ID_NAME, note_elsewhere
from tiers.disk.inspection.verify import verify_all
from tiers.disk.open import open_disk
from tiers.disk.tier import DiskTier
from tiers.errors import ConfigurationError, DirectoryLocked, MissReason
from tiers.tier import Loaded

LAYOUT = BlockLayout.uniform(
    num_layers=1, block_size=16, num_kv_heads=2, head_dim=16, dtype="float32"
)
FRAMES = take(FrameArena(LAYOUT, 17), 17)
IDS = chain(16, block_size=16)
ROOTS = [SCOPE.root()]


def opened(root: Path, *names: str, bad: FaultyStorage | None = None) -> DiskArray:
    """Disks in these folders, known by their names; the last one over `bad`."""
    for name in names:
        if not (root / name).exists():
            (root / name).mkdir()
            (root / name / ID_NAME).write_text(name.encode().hex())

    def open_one(folder: Path) -> DiskTier:
        return open_disk(
            folder, LAYOUT, 2 << 20, storage=bad if folder.name == names[-1] else None, check_s=60
        )

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
    for block in IDS[:6]:
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
    assert store(array) == [], "the others take its part of the keys"
    assert {array.disk_of(block.key).name for block in IDS} == {"a", "b"}
    assert load(array) == Loaded(16, None)
    assert [shard.ready for shard in array.stats().shards] == [True, True, False]
    with pytest.raises(ConfigurationError, match="cannot be reached"):
        array.purge([SCOPE.root()])
    array.close()


def test_a_disk_that_fails_again_and_again_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others take its keys: what is stored from then on is served whole."""
    bad = FaultyStorage()
    array = opened(tmp_path, "a", "b", "c", bad=bad)
    store(array)
    mine = {block.key for block in IDS if array.disk_of(block.key).name == "c"}
    bad.arm(1, count=1_000_000)
    for seed in range(1, 10):
        store(array, chain(16, block_size=16, seed=seed))
    assert "c failed 8 times in a row and is dropped" in caplog.text
    assert [shard.ready for shard in array.stats().shards] == [True, True, False]
    more = chain(16, block_size=16, seed=100)
    assert store(array, more) == []
    assert load(array, more) == Loaded(16, None)
    assert array.held([block.key for block in IDS]) == [block.key not in mine for block in IDS]
    bad.arm(0)
    array.close()
    array = opened(tmp_path, "a", "b", "c", bad=bad)
    assert load(array) == Loaded(16, None), "it is tried again after a restart"
    array.close()


def test_the_last_disk_is_not_dropped(tmp_path: Path) -> None:
    bad = FaultyStorage()
    array = opened(tmp_path, "a", bad=bad)
    bad.arm(1, count=1_000_000)
    for _ in range(20):
        load(array)
    bad.arm(0)
    assert store(array) == []
    assert load(array) == Loaded(16, None)
    array.close()


def test_a_folder_removed_under_the_server_is_begun_anew(tmp_path: Path) -> None:
    array = opened(tmp_path, "a", "b")
    store(array)
    shutil.rmtree(tmp_path / "b")
    for _ in range(3):
        store(array)
    assert load(array) == Loaded(16, None)
    array.close()


def test_a_disk_is_known_wherever_it_is_mounted(tmp_path: Path) -> None:
    array = opened(tmp_path, "a", "b")
    store(array)
    array.close()
    (tmp_path / "b").rename(tmp_path / "moved")
    array = opened(tmp_path, "moved", "a")
    assert load(array) == Loaded(16, None)
    array.close()


def test_what_operators_ask_reaches_every_disk(array: DiskArray) -> None:
    store(array)
    assert array.count([SCOPE.root()]) == 16
    assert array.discard([block.key for block in IDS[8:]]) == 8
    with array.view() as view:
        assert verify_all(view.shards).num_blocks == 8
    assert array.trace(IDS[0].key) == IDS[0]
    assert array.purge([SCOPE.root()]).num_blocks == 8
    assert array.probe(IDS) == 0


def test_folders_that_cannot_work_are_refused(tmp_path: Path, array: DiskArray) -> None:
    with pytest.raises(DirectoryLocked):
        opened(tmp_path, "d", "a")
    with pytest.raises(ConfigurationError, match="named twice"):
        opened(tmp_path, "d", "d")
    (tmp_path / "e").write_text("")
    with pytest.raises(ConfigurationError, match="none of the disk caches can be opened"):
        opened(tmp_path, "e")
    opened(tmp_path, "d").close()


def test_a_purge_without_the_server_reaches_every_disk(tmp_path: Path) -> None:
    array = opened(tmp_path, "disk", "two")
    store(array)
    array.close()
    note_elsewhere(tmp_path / "disk", [str(tmp_path / "two"), "redis://host:1/0"])
    with pytest.raises(ConfigurationError, match="also blocks in redis://host:1/0; start the"):
        purge_stopped(tmp_path, [SCOPE.root()])
    note_elsewhere(tmp_path / "disk", [str(tmp_path / "two"), str(tmp_path / "gone")])
    with pytest.raises(
        ConfigurationError, match="gone cannot be read, so its blocks would be left"
    ):
        purge_stopped(tmp_path, [SCOPE.root()])
    note_elsewhere(tmp_path / "disk", [str(tmp_path / "two")])
    done = purge_stopped(tmp_path, [SCOPE.root()])
    assert (done.removed["disk"].num_blocks, done.num_left) == (16, 0)
    note_elsewhere(tmp_path / "disk", [])


def test_a_purge_reaches_the_folders_of_a_node_that_has_stopped(tmp_path: Path) -> None:
    """An engine over a node leaves a folder for each layout in the server's disk."""
    folders = [tmp_path / "disk" / "node" / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir(parents=True)
        disk = open_disk(folder, LAYOUT, 2 << 20)
        disk.store(IDS, FRAMES[:16])
        disk.close()
    assert [32] == [done.removed["disk"].num_blocks for done in [purge_stopped(tmp_path, ROOTS)]]
    disk = open_disk(folders[0], LAYOUT, 2 << 20)
    disk.store(IDS, FRAMES[:16])
    assert [0] == [done.removed["disk"].num_blocks for done in purge_unserved(tmp_path, ROOTS)]
    disk.close()
    assert [16, 0] == [done.removed["disk"].num_blocks for done in purge_unserved(tmp_path, ROOTS)]
