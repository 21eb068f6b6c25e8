"""One write of the disk tier: the order it leaves, what it spares, and what it says of a fault."""

import errno
import threading

import pytest

from tests.support.disks import CAPACITY, Clock, blocks, closed_later, oldest_first, store
from tests.support.faulty_storage import LAYOUT, FaultyStorage, map_full
from tests.unit.test_disk_ops import load, opened
from tests.unit.test_disk_retention import ACME
from tiers.disk.open import open_disk
from tiers.disk.reader import shard_of
from tiers.disk.storage import Storage
from tiers.policy.quota import QuotaShares

NUM_CHAINS = 60  # more than the tier holds


@pytest.fixture
def tier(tmp_path):
    return opened(tmp_path)


def keys(ids):
    return [block.key for block in ids]


def order_of(tier):
    with tier.view() as view:
        return oldest_first(view.shards[0])


def agrees(tier):
    """Whether records, index, order and totals tell of the same number of blocks."""
    with tier.view() as view:
        return view.shards[0].walk() is None


def fill_up(tier, first=1000):
    for seed in range(first, first + NUM_CHAINS):
        store(tier, blocks(seed))


def test_what_is_stored_again_is_the_last_to_leave(tier):
    for seed in (0, 1, 0):
        store(tier, blocks(seed))
    assert order_of(tier) == keys(blocks(1))[::-1] + keys(blocks(0))[::-1]


def test_after_a_collision_the_block_stored_last_stays(tier):
    ids = blocks()
    store(tier, ids)
    other = ids[1]._replace(content=b"image")
    store(tier, [other])
    assert (load(tier, [other]), load(tier, ids)) == (1, 1)
    assert tier.stats().num_blocks == 4
    assert agrees(tier)


def test_a_store_that_fails_names_its_blocks_and_charges_nobody(tmp_path):
    storage = FaultyStorage()
    shares = QuotaShares(1000, {ACME.root(): 400})
    tier = closed_later(open_disk(tmp_path, LAYOUT, CAPACITY, shares=shares, storage=storage))
    store(tier, blocks(0, scope=ACME))
    before = tier.quotas()
    storage.arm(1, operations=["commit"])
    lost = blocks(1, scope=ACME)
    assert store(tier, lost) == keys(lost)
    assert storage.num_failed == 1
    assert tier.quotas() == before


def test_a_full_map_teaches_the_shard_to_keep_more_free_up_to_a_bound(tmp_path):
    storage = FaultyStorage(error=map_full)
    tier = closed_later(open_disk(tmp_path, LAYOUT, CAPACITY, storage=storage))
    fill_up(tier)
    held = [tier.stats().num_blocks]
    for num_times in (1, 40):
        for _ in range(num_times):
            storage.arm(1, operations=["put"])
            store(tier, blocks(0))
            tier.discard(keys(blocks(0)))
        storage.arm(0)
        fill_up(tier, first=2000)
        held.append(tier.stats().num_blocks)
    assert held[0] > held[1] > held[2] > held[0] // 2


def test_where_the_old_end_has_no_places_before_it_nothing_is_lent(tmp_path):
    tier = opened(tmp_path, moves=True)
    store(tier, blocks(0))
    assert load(tier, blocks(0)) == 4
    store(tier, blocks(1))
    assert order_of(tier) == keys(blocks(0))[::-1] + keys(blocks(1))[::-1]
    assert agrees(tier)


def test_room_is_found_behind_many_pinned_blocks(tier):
    pinned = [key for seed in range(17) for key in keys(blocks(seed))]
    for seed in range(17):
        store(tier, blocks(seed))
    tier.keep(pinned)
    fill_up(tier)
    assert tier.stats().evicted > 0
    assert load(tier, blocks(1000 + NUM_CHAINS - 1)) == 4
    assert all(tier.held(pinned))


def test_a_store_is_refused_where_all_is_pinned(tier):
    fill_up(tier)
    held = order_of(tier)
    tier.keep(held)
    assert store(tier, blocks(0)) == keys(blocks(0))
    assert sorted(order_of(tier)) == sorted(held)


def test_idle_blocks_behind_pinned_ones_expire_a_few_at_a_time(tmp_path):
    clock = Clock()
    tier = opened(tmp_path, clock)
    store(tier, blocks(0))
    store(tier, blocks(1))
    tier.keep(keys(blocks(0)))
    clock.now_s += 100
    gone = []
    with tier.view() as view:
        for _ in range(3):
            with view.shards[0].writing() as writer:
                writer.expire(50, 3)
            gone.append(len(writer.evicted))
    assert gone == [3, 1, 0]
    assert order_of(tier) == keys(blocks(0))[::-1]


def test_shards_are_written_side_by_side_and_fail_alone(tmp_path):
    """Blocks of a shard whose writes fail are refused; those of the others are stored."""

    class OneBadShard(Storage):
        def put(self, txn, key, value, db):
            if threading.current_thread().name.startswith("cachesvc-shard-002"):
                raise OSError(errno.EIO, "bad")
            super().put(txn, key, value, db)

    tier = closed_later(
        open_disk(tmp_path, LAYOUT, 4 * CAPACITY, num_shards=4, storage=OneBadShard())
    )
    ids = [block for seed in range(8) for block in blocks(seed)]
    refused = set()
    for start in range(0, len(ids), 4):
        refused |= set(store(tier, ids[start : start + 4]))
    bad = {block.key for block in ids if shard_of(block.key, 4) == 2}
    assert bad
    assert refused == bad
    assert tier.stats().num_blocks == len(ids) - len(bad)
    assert all(load(tier, [block]) for block in ids if block.key not in bad)
