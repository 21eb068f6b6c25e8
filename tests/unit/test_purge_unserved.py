"""A purge of what another engine left in a data directory, or a refusal that names it."""

import pytest

from cachesvc.operator.purge import purge_unserved, together
from tests.support.faulty_storage import SCOPE, chain, take
from tiers.blocks.frames import FrameArena
from tiers.blocks.layout import BlockLayout
from tiers.disk.directory import note_elsewhere
from tiers.disk.open import open_disk
from tiers.errors import PurgeFailed
from tiers.operations.purge import Purged
from tiers.tier import Removed, TierName

LAYOUT = BlockLayout.uniform(
    num_layers=1, block_size=16, num_kv_heads=2, head_dim=16, dtype="float32"
)
FRAMES = take(FrameArena(LAYOUT, 16), 16)
IDS = chain(16, block_size=16)
ROOTS = [SCOPE.root()]


def fill_disk(folder):
    folder.mkdir(parents=True, exist_ok=True)
    disk = open_disk(folder, LAYOUT, 2 << 20)
    disk.store(IDS, FRAMES)
    disk.close()


def test_a_purge_names_what_it_cannot_reach(tmp_path):
    disk, group = tmp_path / "disk", tmp_path / "checkpoints"
    fill_disk(disk)
    note_elsewhere(disk, "redis://host:1/0")
    with pytest.raises(PurgeFailed, match="also blocks in redis://host:1/0; serve from"):
        purge_unserved(tmp_path, ROOTS)
    note_elsewhere(disk, None, [group])
    with pytest.raises(PurgeFailed, match="checkpoints cannot be read, so its blocks"):
        purge_unserved(tmp_path, ROOTS)
    fill_disk(group)
    (done,) = purge_unserved(tmp_path, ROOTS)
    assert (done.removed["disk"].num_blocks, done.num_left) == (16, 0)
    assert 16 == done.checkpoints["disk"].num_blocks


def test_several_purges_of_the_same_scopes_are_one():
    """A block that any of them left is no purge."""
    ours, rest = (
        Purged(tuple(ROOTS), {tier: Removed(2, 10)}, 1, (tier,), left)
        for tier, left in ((TierName.HOST, 0), (TierName.DISK, 3))
    )
    every = together(ours, [rest, rest])
    assert {TierName.HOST: Removed(2, 10), TierName.DISK: Removed(4, 20)} == every.removed
    assert (("host", "disk", "disk"), 6, 1) == (every.pins, every.num_left, every.in_use)


def test_a_purge_reaches_the_folders_of_a_node_that_has_stopped(tmp_path):
    """An engine over a node leaves a folder for each layout in the server's disk."""
    folders = [tmp_path / "disk" / "node" / name for name in ("one", "two")]
    for folder in folders:
        fill_disk(folder)
    assert [16, 16] == [done.removed["disk"].num_blocks for done in purge_unserved(tmp_path, ROOTS)]
    disk = open_disk(folders[0], LAYOUT, 2 << 20)
    disk.store(IDS, FRAMES)
    assert [0] == [done.removed["disk"].num_blocks for done in purge_unserved(tmp_path, ROOTS)]
    disk.close()
    assert [16, 0] == [done.removed["disk"].num_blocks for done in purge_unserved(tmp_path, ROOTS)]
