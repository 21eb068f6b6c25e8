"""The miss-ratio curve against the truth, and its bounds."""

import pytest
import xxhash

from tests.support.workloads import ChatLoad, Documents, make_trace
from tiers.replay.replay import TierPlan, replay
from tiers.replay.trace import Trace, TraceRequest
from tiers.telemetry.working_set import WorkingSet

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
