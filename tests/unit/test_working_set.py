"""The miss-ratio curve against the truth, its bounds, and after a restart: what the disk holds was
used before."""

from array import array
from concurrent.futures import Future
from pathlib import Path

import pytest
import xxhash

from tests.bench.served import LAYOUT, TOKENS, serve, settle
from tests.support.workloads import ChatLoad, Documents, make_trace
from tests.unit.test_disk_ops import Clock, blocks, opened, store
from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope
from tiers.cache import CacheSettings, TieredCache
from tiers.disk.open import open_disk
from tiers.disk.sampling import WHOLE, hash_of, in_order
from tiers.replay.replay import TierPlan, replay
from tiers.replay.trace import Trace, TraceRequest
from tiers.telemetry.working_set import Traffic, WorkingSet
from tiers.tier import Sample, TierName

TRACE = make_trace("t", [ChatLoad(0.5), Documents(1.0)], duration_s=1200.0, seed=2)
STREAM = [block for request in TRACE.requests for block in reversed(request.blocks)]


def lru_hit_rate(capacity: int) -> float:
    """By block and use, each block a request of its own."""
    requests = [TraceRequest(0.0, 1, (block,)) for block in STREAM]
    return replay(Trace("s", requests, 1), [TierPlan("c", capacity)]).hit_rate


@pytest.mark.parametrize(
    ("max_samples", "error", "capacities"),
    [(100_000, 0.01, (200, 1000, 4000, 20_000)), (1000, 0.05, (1000, 4000, 20_000))],
)
def test_the_curve_is_what_lru_hits(max_samples, error, capacities):
    """Exact but for the spacing of its points when all is followed; near with a sample.

    A sample of 1 in 20 says little of caches of few sampled blocks.
    """
    working_set = WorkingSet(max_samples)
    for block in STREAM:
        working_set.use(block)
    curve = working_set.curve()
    assert curve.working_set_blocks == pytest.approx(len(set(STREAM)), rel=10 * error)
    for capacity in capacities:
        assert curve.hit_rate(capacity) == pytest.approx(lru_hit_rate(capacity), abs=error)
    assert list(curve.hit_rates) == sorted(curve.hit_rates)


def _key(number: int) -> bytes:
    return xxhash.xxh3_128_digest(number.to_bytes(8, "little"))


@pytest.mark.parametrize("max_samples", [60, 10_000])
def test_a_lookup_at_once_counts_as_its_blocks_one_by_one(max_samples):
    one, all_at_once = WorkingSet(max_samples), WorkingSet(max_samples)
    for request in TRACE.requests:
        keys = [_key(hash(block)) for block in request.blocks]
        all_at_once.use_all(keys)
        for key in keys:
            one.use(key)
    assert one.curve() == all_at_once.curve()


def test_a_generated_block_is_reused_by_the_first_who_asks_for_it():
    working_set = WorkingSet()
    for number in range(3):
        working_set.made(_key(number))
    for number in range(3):
        working_set.use(_key(number))
    assert working_set.num_uses == 3
    assert working_set.curve().hit_rate(4) == 1.0


def test_memory_is_bounded_and_the_rate_falls():
    working_set = WorkingSet(max_samples=50)
    for number in range(10_000):
        working_set.use(_key(number))
    assert len(working_set._slots) <= 50
    assert len(working_set._by_hash) <= 51
    assert working_set.rate < 0.02
    assert working_set.curve().working_set_blocks == pytest.approx(10_000, rel=0.4)


def test_no_reuse_makes_an_empty_curve():
    working_set = WorkingSet()
    assert working_set.curve().hit_rate(100) == 0.0
    working_set.use("a")
    assert working_set.curve().capacities == ()


ROOT = CacheScope(tenant=b"tester").root()
NUM_PROMPTS = 40
LENGTH = 6


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
    keys = [_key(number) for number in range(5000)]
    sample = in_order([(number, key) for number, key in enumerate(keys)], 500, WHOLE)
    assert len(sample.keys) == 500
    assert list(sample.keys) == [key for key in keys if hash_of(key) < sample.bound]
    working_set = WorkingSet(max_samples=500)
    working_set.remember(sample)
    assert working_set.curve().working_set_blocks == pytest.approx(5000, rel=0.2)
    working_set.use_all(keys)
    assert working_set.curve().hit_rate(6000) == pytest.approx(1.0, abs=0.01)


def test_lookups_wait_for_the_memory_and_a_fault_is_no_memory():
    for answer, hit_rate in ((Sample((_key(1),), WHOLE), 1.0), (OSError("gone"), 0.0)):
        traffic, sample = Traffic(), Future[Sample]()
        traffic.begin(lambda limit, sample=sample: sample)
        traffic.asked([_key(1)])
        traffic.made(_key(2))
        traffic.step()
        if isinstance(answer, Sample):
            sample.set_result(answer)
        else:
            sample.set_exception(answer)
        report = traffic.report({TierName.DEVICE: 10}, block_tokens=1, block_bytes=1)
        assert (report.num_uses, report.tiers[0].hit_rate) == (1, hit_rate)
