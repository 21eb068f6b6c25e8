"""Quotas on disk, what a tier that moves gives up first, and idle blocks that are pinned."""

from tests.support.disks import FRAMES, Clock, blocks, closed_later, load
from tests.support.disks import store as stored
from tests.support.faulty_storage import LAYOUT
from tiers.blocks.keys import CacheScope
from tiers.disk.open import open_disk
from tiers.disk.settings import DiskSettings
from tiers.policy.quota import COMMON, QuotaShares
from tiers.tier import Cause

CAPACITY = 3 << 20
ACME = CacheScope(tenant=b"acme")
SCAN = CacheScope(tenant=b"scan")


def open_tier(root, *, quota=None, settings=None, clock=None):
    shares = QuotaShares(1000, {ACME.root(): int(1000 * quota)}) if quota else None
    given = {"shares": shares, "settings": settings, "clock": clock or Clock()}
    return closed_later(open_disk(root, LAYOUT, CAPACITY, check_s=60, **given))


def store(tier, scope, seed):
    ids = blocks(seed, 8, scope)
    stored(tier, ids)
    return ids


def scan(tier, num_chains, first=1000):
    for seed in range(first, first + num_chains):
        store(tier, SCAN, seed)


def moving(root):
    """A tier that moves. The old end of its order has room for sequences before it."""
    tier = open_tier(root, settings=DiskSettings(moves=True))
    scan(tier, 60)
    return tier


def test_a_scan_leaves_a_tenant_its_share_of_the_disk(tmp_path):
    tier = open_tier(tmp_path, quota=0.4)
    mine = [store(tier, ACME, seed) for seed in range(4)]
    used, share = tier.quotas()[ACME.root()]
    assert 0 < used < share
    scan(tier, 100)
    assert [8] * 4 == [tier.probe(ids) for ids in mine]
    assert tier.quotas()[ACME.root()] == (used, share)
    assert set(tier.stats().lives.causes) == {Cause.QUOTA}


def test_what_each_group_has_is_counted_again_at_start(tmp_path):
    tier = open_tier(tmp_path, quota=0.4)
    store(tier, ACME, 1)
    scan(tier, 2)
    before = tier.quotas()
    tier.close()
    tier = open_tier(tmp_path, quota=0.4)
    assert tier.quotas() == before
    assert before[COMMON][0] == 2 * before[ACME.root()][0]
    tier.purge([ACME.root()])
    assert tier.quotas()[ACME.root()][0] == 0


def test_what_was_read_leaves_first_where_the_tier_moves(tmp_path):
    tier = moving(tmp_path)
    read, other = store(tier, ACME, 1), store(tier, ACME, 2)
    assert load(tier, read).num_blocks == 8
    scan(tier, 4, first=2000)
    assert (tier.probe(read), tier.probe(other)) == (0, 8)


def test_what_the_tiers_above_gave_up_was_used_until_then(tmp_path):
    tier = open_tier(tmp_path)
    old, other = store(tier, ACME, 1), store(tier, ACME, 2)
    tier.demoted([block.key for block in reversed(old)], [0.0] * 8)
    seed = 1000
    while tier.probe(other) == 8:
        scan(tier, 1, first=seed)
        seed += 1
    assert tier.probe(old) == 8


def test_what_the_tiers_above_gave_up_is_no_longer_first(tmp_path):
    tier = moving(tmp_path)
    read = store(tier, ACME, 1)
    load(tier, read)
    tier.demoted([block.key for block in read], [0.0] * 8)
    scan(tier, 4, first=2000)
    assert tier.probe(read) == 8


def test_of_what_was_read_the_tail_leaves_before_the_head(tmp_path):
    tier = moving(tmp_path)
    read = store(tier, ACME, 1)
    load(tier, read)
    seen = 8
    for seed in range(2000, 2060):
        tier.store(blocks(seed, 1, SCAN), FRAMES[:1])
        held = tier.held([block.key for block in read])
        assert held == sorted(held, reverse=True), "the head left before the tail"
        seen = min(seen, sum(held))
    assert seen < 8


def test_idle_blocks_leave_and_pinned_ones_stay(tmp_path):
    clock = Clock()
    tier = open_tier(tmp_path, settings=DiskSettings(idle_ttl_s=100), clock=clock)
    idle, pinned = store(tier, ACME, 1), store(tier, ACME, 2)
    tier.keep([block.key for block in pinned])
    clock.now_s += 101
    tier.flush()
    assert (tier.probe(idle), tier.probe(pinned)) == (0, 8)
    assert tier.stats().lives.causes == {Cause.AGE: 8}
