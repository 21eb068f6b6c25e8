"""Disks of a few megabytes, which turn over again and again: they evict and go on storing.

LMDB copies each page that it changes and uses the old one again two commits later, so on a small
disk it is the changes to the indexes, not the records, that may fill the map.
"""

import random

import pytest

from tests.support.disks import oldest_first
from tests.support.faulty_storage import chain, fetched, put, take
from tiers.blocks.frames import FrameArena
from tiers.blocks.layout import BlockLayout
from tiers.disk.inspection.maintenance import delete
from tiers.disk.open import open_disk
from tiers.disk.settings import DiskSettings
from tiers.disk.storage import MapFull, Storage

TOKENS = 4
SMALL = BlockLayout.uniform(
    num_layers=8, block_size=TOKENS, num_kv_heads=1, head_dim=32, dtype="float16"
)  # 4 KiB: the indexes take a tenth of the disk
LARGE = BlockLayout.uniform(
    num_layers=8, block_size=TOKENS, num_kv_heads=4, head_dim=256, dtype="float16"
)  # 128 KiB
RUN = 8


class CountingStorage(Storage):
    """Counts how often the map was full."""

    def __init__(self):
        self.num_full = 0

    def put(self, *args):
        self._counting(super().put, *args)

    def delete(self, *args):
        return bool(self._counting(super().delete, *args))

    def commit(self, *args):
        self._counting(super().commit, *args)

    def _counting(self, work, *args):
        try:
            return work(*args)
        except MapFull:
            self.num_full += 1
            raise


class SmallDisk:
    """A small disk, and a writer that brings it more than it holds."""

    def __init__(self, root, layout, num_bytes, **settings):
        self.storage = CountingStorage()
        behaviour = DiskSettings(**settings)
        self.tier = open_disk(root, layout, num_bytes, storage=self.storage, settings=behaviour)
        self.frames = take(FrameArena(layout, RUN + 1), RUN + 1)
        self.dice = random.Random(1)
        self.num_runs = 0

    def run(self, number):
        return chain(RUN, block_size=TOKENS, seed=number)

    def store(self):
        ids = self.run(self.num_runs)
        self.num_runs += 1
        put(self.tier, ids, self.frames)

    def fill_up(self):
        while not self.tier.stats().evicted:
            self.store()

    def load(self, num_runs):
        """Hits on runs that may be there still."""
        some = [self.run(self.dice.randrange(self.num_runs)) for _ in range(num_runs)]
        return sum(fetched(self.tier, ids, self.frames).num_blocks for ids in some)

    def has_newest(self):
        return self.tier.probe(self.run(self.num_runs - 1)) == RUN


@pytest.mark.parametrize("layout", [SMALL, LARGE])
@pytest.mark.parametrize("moves", [False, True])
def test_many_hits_between_stores_fill_no_map(tmp_path, layout, moves):
    disk = SmallDisk(tmp_path, layout, 4_000_000, moves=moves)
    disk.fill_up()
    held = disk.tier.stats().num_blocks
    for _ in range(8):
        assert disk.load(40) > 0
        disk.store()
        assert disk.has_newest()
    assert (disk.storage.num_full, dict(disk.tier.stats().faults)) == (0, {})
    assert disk.tier.stats().num_blocks > 0.9 * held
    disk.tier.close()


def test_blocks_go_by_request_from_a_full_disk(tmp_path):
    disk = SmallDisk(tmp_path, SMALL, 4_000_000)
    disk.fill_up()
    held = disk.tier.stats().num_blocks
    with disk.tier.view() as view:
        even = [key for key in oldest_first(view.shards[0]) if key[0] % 2 == 0]
        removed = delete(view.shards[0], even)
    assert removed > held / 4
    gone = disk.tier.discard([b.key for n in range(disk.num_runs) for b in disk.run(n)])
    assert removed + gone == held
    assert (disk.storage.num_full, dict(disk.tier.stats().faults)) == (0, {})
    disk.tier.close()
