"""What more cache would be worth, on curves whose answer is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.admin.pages.working_set import GIB, CurveTier, advise, hit_rate
from billing.prices.book import Rates
from tiers.telemetry.working_set import MissRatioCurve, WorkingSet
from tiers.tier import TierName

RATES = Rates(hit_device=10, hit_host=10, hit_disk=40, hit_remote=10, miss=100, output=0)
CURVE = MissRatioCurve((100, 200, 400), (0.5, 0.6, 0.8), 1000)


@pytest.mark.parametrize(
    ("blocks", "expected"), [(0, 0), (50, 0.25), (100, 0.5), (150, 0.55), (300, 0.7), (9999, 0.8)]
)
def test_between_its_points_the_curve_is_straight(blocks: float, expected: float) -> None:
    assert expected == pytest.approx(hit_rate(CURVE, blocks))


def test_one_more_gib_is_worth_the_misses_that_become_hits() -> None:
    levels = [CurveTier(TierName.DEVICE, 100, GIB / 100), CurveTier(TierName.DISK, 100, GIB / 200)]
    device, disk = advise(CURVE, levels, RATES, 1_000_000)
    # 100 more blocks on the device: 0.6 -> 0.7 over all; 0.1 moves up from disk to device.
    assert 0.1 == pytest.approx(device.hit_rate_gain)
    assert 100_000 == pytest.approx(device.tokens)
    assert round(0.1 * 1e6 * 90) == device.worth
    # 200 more blocks on disk: 0.6 -> 0.8, all of them disk hits.
    assert 0.2 == pytest.approx(disk.hit_rate_gain)
    assert round(0.2 * 1e6 * 60) == disk.worth


def test_past_the_working_set_more_is_worth_nothing() -> None:
    levels = [CurveTier(TierName.HOST, 1000, 1024)]
    (advice,) = advise(CURVE, levels, RATES, 1_000_000)
    assert (0.0, 0.0, 0) == (advice.hit_rate_gain, advice.tokens, advice.worth)
    assert 0 == advise(MissRatioCurve((), (), 0), levels, RATES, 1e6)[0].worth


@given(st.lists(st.integers(0, 60), min_size=2, max_size=400), st.floats(1, 100), st.floats(1, 50))
def test_more_never_costs_and_never_exceeds_a_perfect_cache(
    uses: list[int], blocks: float, extra: float
) -> None:
    working_set = WorkingSet(64)
    for key in uses:
        working_set.use(key)
    levels = [CurveTier(TierName.HOST, blocks, 1.0), CurveTier(TierName.DISK, 2 * blocks, 1.0)]
    told = advise(working_set.curve(), levels, RATES, 1000.0, extra_bytes=round(extra))
    assert all(0 <= each.hit_rate_gain <= 1 for each in told)
    assert all(0 <= each.worth <= 1000 * RATES.miss for each in told)
