"""When a block was computed and last used: true through every tier, a flush and a restart, and
whatever the clock does; and a block that is served from there is looked into once: its header
proved, its record read."""

import time
from array import array
from collections import Counter

import pytest

from tests.support.caches import cache_of
from tests.support.disks import Clock, blocks
from tests.support.disks import store as store_now
from tests.support.served import LAYOUT, ROOT, TOKENS, serve, settle
from tests.unit.test_disk_ops import load, opened
from tiers.blocks.chain import Chain
from tiers.disk import reader
from tiers.disk.inspection.view import open_view
from tiers.disk.open import open_disk
from tiers.disk.shard import Shard
from tiers.memory.block import Below
from tiers.policy.policy import Use
from tiers.tier import TierName

HOUR, DAY, YEAR = 3600, 86_400, 365 * 86_400
NUM_BLOCKS = 6
CHAIN = Chain(ROOT, array("i", range(NUM_BLOCKS * TOKENS)), TOKENS)


def times(root):
    """When each block on disk was computed and used, as commands show it."""
    with open_view(root) as view:
        return [(block.computed_s, block.used_s) for block in view.blocks()]


def cache_over(root, clock=None):
    disk = open_disk(root, LAYOUT, 4 << 20, clock=clock, check_s=60)
    cache = cache_of(LAYOUT, 2 * NUM_BLOCKS, 2 * NUM_BLOCKS, disk=disk)
    cache.start()
    serve(cache, CHAIN)
    return cache


def check_times(root, computed, used):
    of_each = (pytest.approx(computed, abs=HOUR / 2), pytest.approx(used, abs=HOUR / 2))
    assert [of_each] * NUM_BLOCKS == times(root)


def test_a_flush_at_shutdown_keeps_the_true_times(tmp_path):
    cache = cache_over(tmp_path)
    now_s = time.monotonic()
    used = Use(now_s - 2 * HOUR, ROOT)
    for block in cache.index:
        block.created_s, block.use = now_s - DAY, used
    cache.close()
    check_times(tmp_path, time.time() - DAY, time.time() - 2 * HOUR)


def test_age_goes_on_after_a_promotion_and_the_next_demotion(tmp_path):
    clock = Clock()
    cache_over(tmp_path, clock).close()
    first_s = clock.now_s
    clock.now_s += DAY
    cache = cache_over(tmp_path, clock)
    settle(cache)
    now_s = time.monotonic()
    ages = [now_s - block.created_s for block in cache.index]
    assert ages == [pytest.approx(DAY, abs=HOUR)] * NUM_BLOCKS
    cache.disk.discard(CHAIN.keys)
    for block in cache.index:
        block.below = Below.ABSENT
    cache.close()
    check_times(tmp_path, first_s, first_s + DAY)


def test_what_memory_gives_up_was_used_when_it_was(tmp_path):
    clock = Clock()
    tier = opened(tmp_path, clock)
    store_now(tier, blocks(0))
    clock.now_s += DAY
    tier.demoted([block.key for block in blocks(0)], [HOUR] * 4)
    tier.close()
    assert {used_s for _, used_s in times(tmp_path)} == {int(clock.now_s) - HOUR}


def test_a_pinned_block_that_is_passed_over_was_not_used(tmp_path):
    clock = Clock()
    began_s = int(clock.now_s)
    tier = opened(tmp_path, clock)
    store_now(tier, blocks(0))
    tier.keep([block.key for block in blocks(0)])
    clock.now_s += DAY
    for seed in range(1, 61):
        store_now(tier, blocks(seed))
    tier.close()
    assert sorted(used_s for _, used_s in times(tmp_path))[:4] == [began_s] * 4


def test_idle_blocks_expire_by_their_last_use_also_behind_others(tmp_path):
    clock = Clock()
    tier = opened(tmp_path, clock, idle_ttl_s=HOUR)
    store_now(tier, blocks(0))
    store_now(tier, blocks(1))
    tier.demoted([block.key for block in blocks(1)], [HOUR - 60] * 4)
    tier.flush()
    clock.now_s += 120
    tier.flush()
    assert (tier.probe(blocks(0)), tier.probe(blocks(1))) == (4, 0)
    tier.close()


@pytest.mark.parametrize("jump_s", [YEAR, -YEAR])
def test_a_clock_that_jumps_between_two_runs(tmp_path, jump_s):
    """Nothing expires at once, and unused blocks expire a ttl later."""
    clock = Clock()
    tier = opened(tmp_path, clock, idle_ttl_s=HOUR)
    for seed in range(3):
        store_now(tier, blocks(seed))
    tier.close()
    clock.now_s += jump_s
    tier = opened(tmp_path, clock, idle_ttl_s=HOUR)
    tier.flush()
    assert tier.stats().num_blocks == 12
    clock.now_s += HOUR / 2
    assert load(tier, blocks(0)) == 4
    clock.now_s += HOUR / 2 + 60
    tier.flush()
    assert [tier.probe(blocks(seed)) for seed in range(3)] == [4, 0, 0]
    tier.close()


def test_each_block_of_a_disk_hit_is_proved_and_read_once(tmp_path, monkeypatch):
    def served() -> dict[TierName, int]:
        """Of a server of its own, which flushes its blocks at its end."""
        cache = cache_of(LAYOUT, 40, 40, disk=open_disk(tmp_path, LAYOUT, 64 << 20))
        cache.start()
        hits = serve(cache, CHAIN)
        assert cache.close() == 0
        return hits

    assert served() == {}
    counts: Counter[str] = Counter()
    prove, read = reader.is_block, Shard.read
    monkeypatch.setattr(reader, "is_block", lambda *args: counts.update(["proved"]) or prove(*args))
    monkeypatch.setattr(Shard, "read", lambda *args: counts.update(["read"]) or read(*args))
    assert served() == {TierName.DISK: NUM_BLOCKS * TOKENS}
    assert counts == {"proved": NUM_BLOCKS, "read": NUM_BLOCKS}
