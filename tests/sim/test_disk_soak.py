"""Seeded lives of a disk tier: random work, faults, crashes and restarts, against a plain model.

Each step stores, loads, discards, flushes, purges, restarts, or arms a fault. Always: what is
loaded is byte for byte what was stored; the folder never exceeds its capacity; nothing raises. The
suite runs a few short lives, and `pytest -m slow` long ones.
"""

import random

import pytest

from tests.support import faulty_storage as faulty
from tiers.blocks.frames import FrameArena
from tiers.blocks.keys import CacheScope
from tiers.blocks.layout import BlockLayout
from tiers.disk.inspection.verify import verify_all
from tiers.disk.open import open_disk
from tiers.disk.settings import DiskSettings
from tiers.errors import MissReason

LAYOUT = BlockLayout.uniform(
    num_layers=2, block_size=16, num_kv_heads=2, head_dim=16, dtype="bfloat16"
)
CAPACITY = 1 << 20
NUM_CHAINS = 60
CHAIN_BLOCKS = 8
ERRORS = [faulty.io_error, faulty.disk_full, faulty.map_full]


def disk_usage(root):
    """What `du` says of the folder."""
    return sum(path.stat().st_blocks * 512 for path in [root, *root.rglob("*")])


class Life:
    """One seeded run of one tier in one folder."""

    def __init__(self, seed, root):
        self.random = random.Random(seed)
        self.root = root
        self.now_s = 1_700_000_000.0
        self.storage = faulty.FaultyStorage()
        self.num_shards = self.random.choice([1, 1, 2])
        self.settings = DiskSettings(
            moves=self.random.choice([False, True]), idle_ttl_s=self.random.choice([None, 5000])
        )
        self.frames = faulty.take(FrameArena(LAYOUT, CHAIN_BLOCKS + 1), CHAIN_BLOCKS + 1)
        self.scopes = [CacheScope(tenant=name) for name in (b"a", b"b")]
        self.written_bytes = 0
        self.num_hits = 0
        self.tier = self.open()

    def open(self):
        return open_disk(
            self.root,
            LAYOUT,
            self.num_shards * CAPACITY,
            num_shards=self.num_shards,
            settings=self.settings,
            storage=self.storage,
            clock=lambda: self.now_s,
        )

    def step(self):
        self.now_s += self.random.expovariate(1 / 20)
        work = self.random.choices(
            [self.store, self.load, self.discard, self.flush, self.restart, self.fault, self.purge],
            weights=[40, 40, 4, 3, 1, 6, 1],
        )[0]
        work()
        stats = self.tier.stats()
        assert stats.used_bytes <= stats.setting_bytes
        assert disk_usage(self.root) <= stats.setting_bytes

    def blocks(self):
        number = int(NUM_CHAINS * self.random.random() ** 2)
        scope = self.scopes[number % 2]
        count = self.random.randint(1, CHAIN_BLOCKS)
        return faulty.chain(count, block_size=LAYOUT.block_size, seed=number, scope=scope)

    def store(self):
        ids = self.blocks()
        for frame, block in zip(self.frames, ids, strict=False):
            faulty.fill(frame, block)
        before = self.tier.stats().written_bytes
        self.tier.store(ids, self.frames[: len(ids)])
        self.written_bytes += self.tier.stats().written_bytes - before

    def load(self):
        ids = self.blocks()
        loaded = self.tier.load(ids, self.frames[: len(ids)])
        self.num_hits += loaded.num_blocks
        for frame, block in zip(self.frames[: loaded.num_blocks], ids, strict=False):
            assert faulty.holds(frame, block, self.frames[-1]), f"wrong bytes for {block.key.hex()}"
        assert loaded.reason in (None, MissReason.ABSENT, MissReason.IO_ERROR)

    def discard(self):
        self.tier.discard([block.key for block in self.blocks()])

    def purge(self):
        self.storage.arm(0)
        self.tier.purge([self.scopes[1].root()])
        with self.tier.view() as view:
            assert self.scopes[1].root() not in view.accounts()

    def flush(self):
        self.tier.flush()

    def fault(self):
        self.storage._error = self.random.choice(ERRORS)
        self.storage.arm(self.random.randint(1, 60), count=self.random.choice([1, 1, 3, 20]))

    def restart(self):
        """Close, or be abandoned as a killed process would leave it; then open again."""
        self.storage.arm(0)
        if self.random.random() < 0.5:
            self.tier.close()
        else:
            for slot in self.tier._slots:
                slot.close()
            self.tier._lock.release()
        self.tier = self.open()

    def end(self):
        """Sound, accounted for, and still of use."""
        self.storage.arm(0)
        with self.tier.view() as view:
            assert verify_all(view.shards).sound
            listed = list(view.blocks())
            stored = sum(account.num_blocks for account in view.accounts().values())
        assert len(listed) == stored == self.tier.stats().num_blocks
        self.store()
        self.tier.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_short_life(seed, tmp_path):
    """A few hundred steps with faults and restarts."""
    life = Life(seed, tmp_path / "disk")
    for _ in range(400):
        life.step()
    life.end()
    assert life.num_hits > 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(6, 60))
def test_a_long_life(seed, tmp_path):
    """Twelve capacities are written."""
    life = Life(seed, tmp_path / "disk")
    while life.written_bytes < 12 * life.tier.capacity_bytes:
        life.step()
    life.end()
    assert life.num_hits > 50
