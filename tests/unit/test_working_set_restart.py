"""The working set after a restart: what the disk holds was used before."""

from array import array
from concurrent.futures import Future
from pathlib import Path

import pytest
import xxhash

from tests.bench.served import LAYOUT, TOKENS, serve, settle
from tests.unit.test_disk_ops import Clock, blocks, opened, store
from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope, PrefixKey
from tiers.cache import CacheSettings, TieredCache
from tiers.disk.open import open_disk
from tiers.disk.sampling import WHOLE, hash_of, in_order
from tiers.telemetry.working_set import Traffic, WorkingSet
from tiers.tier import Sample, TierName

ROOT = CacheScope(tenant=b"tester").root()
NUM_PROMPTS = 40
LENGTH = 6


def key_of(number: int) -> PrefixKey:
    return PrefixKey(xxhash.xxh3_128_digest(number.to_bytes(8, "little")))


def run(folder: Path) -> float:
    """Ask each prompt once, in a server of its own; what its working set says of its tiers."""
    disk = open_disk(folder, LAYOUT, 16 << 20, check_s=60)
    memory = 4 * LENGTH * LAYOUT.nbytes
    cache = TieredCache(
        LAYOUT,
        CacheSettings(device_bytes=memory, host_bytes=memory, weigh_loads=False),
        disk=disk,
    )
    cache.start()
    for number in range(NUM_PROMPTS):
        first = 1_000 * number
        tokens = array("i", range(first, first + LENGTH * TOKENS))
        serve(cache, Chain(ROOT, tokens, TOKENS))
        settle(cache)
    report = cache.operations.working_set()
    cache.close()
    return report.tiers[-1].hit_rate


def test_a_restart_is_no_first_use(tmp_path):
    assert run(tmp_path) == 0.0
    assert run(tmp_path) == 1.0


def test_the_distances_go_on_from_the_order_on_disk(tmp_path):
    """Of two runs of four prompts the last two were used most recently."""
    clock = Clock()
    tier = opened(tmp_path, clock)
    for seed in range(4):
        clock.now_s += 10
        store(tier, blocks(seed))
    working_set = WorkingSet()
    working_set.remember(tier.sample(1000))
    working_set.use_all([block.key for block in blocks(2)])
    assert [working_set.curve().hit_rate(size) for size in (4, 9)] == [0.0, 1.0]
    tier.close()


def test_a_sample_is_of_the_keys_under_one_bound():
    keys = [key_of(number) for number in range(5000)]
    sample = in_order([(number, key) for number, key in enumerate(keys)], 500, WHOLE)
    assert len(sample.keys) == 500
    assert list(sample.keys) == [key for key in keys if hash_of(key) < sample.bound]
    working_set = WorkingSet(max_samples=500)
    working_set.remember(sample)
    assert working_set.curve().working_set_blocks == pytest.approx(5000, rel=0.2)
    working_set.use_all(keys)
    assert working_set.curve().hit_rate(6000) == pytest.approx(1.0, abs=0.01)


def test_lookups_wait_for_the_memory_and_a_fault_is_no_memory():
    for answer, hit_rate in ((Sample((key_of(1),), WHOLE), 1.0), (OSError("gone"), 0.0)):
        traffic, sample = Traffic(), Future[Sample]()
        traffic.begin(lambda limit, sample=sample: sample)
        traffic.asked([key_of(1)])
        traffic.made(key_of(2))
        traffic.step()
        if isinstance(answer, Sample):
            sample.set_result(answer)
        else:
            sample.set_exception(answer)
        report = traffic.report({TierName.DEVICE: 10}, block_tokens=1, block_bytes=1)
        assert (report.num_uses, report.tiers[0].hit_rate) == (1, hit_rate)
