"""What is loaded and what is computed, by what each was measured to cost."""

import pytest

from cachesvc.vllm.weighing import Weigher
from tests.support.disks import Clock
from tiers.tier import TierName
from tiers.transfer.economy import RETRY_EVERY, Cost, CostLine, LoadEconomy

HOST, DISK, REMOTE = TierName.HOST, TierName.DISK, TierName.REMOTE
SIZE = 16


def measured(*pairs):
    cost = Cost()
    for size, seconds in pairs:
        cost.observe(size, seconds)
    return cost.line


def economy_of(token_s):
    economy = LoadEconomy()
    economy.compute.observe(100, 100 * token_s)
    return economy


def leading(economy, tiers, **each_s):
    loads = {TierName(tier): CostLine(0.0, seconds) for tier, seconds in each_s.items()}
    return economy.worth_leading(tiers, loads, block_bytes=1.0, block_tokens=1)


def test_a_cost_has_a_fixed_part_and_one_for_each_unit():
    assert CostLine(0.0, 0.5) == measured((4, 2.0)), "by one measurement nothing is fixed"
    fixed_s, each_s = measured((10, 2.0), (20, 3.0), (40, 5.0))
    assert (pytest.approx(1.0), pytest.approx(0.1)) == (fixed_s, each_s)
    fixed_s, each_s = measured((10, 5.0), (12, 4.5))
    assert each_s == 0.0 < fixed_s, "more work never costs less"
    assert CostLine() == measured((0, 1.0), (1, 0.0))


def test_what_got_much_cheaper_is_believed_at_once_and_what_got_dearer_soon():
    assert CostLine(0.0, 0.1) == measured(*[(10, 100.0)] * 5, (10, 1.0))
    _, each_s = measured((10, 1.0), *[(10, 100.0)] * 3)
    assert each_s > 8.0


def test_nothing_is_forbidden_that_was_never_measured():
    tiers = [HOST, DISK, REMOTE]
    assert 3 == leading(LoadEconomy(), tiers, host=9.0, disk=9.0, remote=9.0)
    assert 3 == leading(economy_of(1.0), tiers, host=0.1, disk=0.1)
    assert 2 == leading(economy_of(1.0), tiers, host=0.1, disk=0.1, remote=9.0)
    off = LoadEconomy(enabled=False, compute=economy_of(1.0).compute)
    assert 3 == leading(off, tiers, host=9.0, disk=9.0, remote=9.0)


@pytest.mark.parametrize(
    ("tiers", "disk", "num_blocks"),
    [
        ([HOST] * 2 + [DISK] * 3, 2.0, 2),
        ([HOST] * 2 + [DISK] * 3, 0.5, 5),
        ([DISK] * 3, 2.0, 0),
        ([DISK] * 3, 0.95, 0),  # by less than the margin
        ([DISK] + [HOST] * 4, 2.0, 5),  # the first opens the way to the others
        ([DISK] * 4 + [HOST], 2.0, 0),
        ([HOST] + [DISK] * 4 + [HOST], 2.0, 1),
    ],
)
def test_as_many_blocks_are_loaded_as_save_the_most_time(tiers, disk, num_blocks):
    assert num_blocks == leading(economy_of(1.0), tiers, host=0.0, disk=disk)


def test_the_fixed_part_of_a_load_is_paid_once():
    loads = {DISK: CostLine(3.0, 0.5)}
    economy = economy_of(1.0)
    found = [
        economy.worth_leading(tiers, loads, block_bytes=1.0, block_tokens=1)
        for tiers in ([DISK] * 6, [DISK] * 9, [DISK] * 5 + [HOST] + [DISK] * 4)
    ]
    assert [0, 9, 10] == found


def test_what_was_refused_often_is_tried_again_with_a_little_of_it():
    economy, tiers = economy_of(1.0), [HOST] + [DISK] * 60
    found = []
    for _ in range(2 * RETRY_EVERY):
        found.append(leading(economy, tiers, host=0.0, disk=2.0))
        economy.refuse(found[-1] < len(tiers))
    once = [1] * (RETRY_EVERY - 1) + [4]
    assert once * 2 == found
    assert 2 * (RETRY_EVERY - 1) == economy.refused


@pytest.fixture
def weigher():
    return Weigher(LoadEconomy(), Clock())


def step(weigher, scheduled, seconds, *, loads=False):
    weigher.begun(scheduled, loads=loads)
    weigher.clock_s.now_s += seconds
    weigher.ended()


def test_the_steps_of_prompts_tell_what_a_token_takes(weigher):
    step(weigher, {"a": 1, "b": 1}, 5.0)
    step(weigher, {"a": 20}, 5.0)
    step(weigher, {"a": 400}, 90.0, loads=True)
    weigher.ended()
    assert CostLine() == weigher.economy.compute.line, "answers, few tokens and loads tell nothing"
    step(weigher, {"a": 100, "b": 1}, 2.0)
    step(weigher, {"a": 200, "b": 1, "c": 100}, 4.0)
    fixed_s, each_s = weigher.economy.compute.line
    assert (pytest.approx(1.0), pytest.approx(0.01)) == (fixed_s, each_s)


def test_steps_that_overlap_share_no_seconds(weigher):
    weigher.begun({"a": 100}, loads=False)
    weigher.begun({"a": 100}, loads=False)
    for _ in range(2):
        weigher.clock_s.now_s += 1.0
        weigher.ended()
    assert pytest.approx(1.0) == weigher.economy.compute.line.each_s * 100


def test_a_load_from_below_is_copied_too(weigher):
    step(weigher, {"a": 100}, 100.0)

    def worth(tiers):
        return weigher.worth(tiers, {DISK: CostLine(0.0, 0.5)}, nbytes=SIZE, num_tokens=SIZE)

    assert 0 == worth([])
    assert 1 == worth([DISK])
    weigher.copied(SIZE, 0.6 * SIZE)
    assert (1, 0) == (worth([HOST]), worth([DISK]))
