"""What is loaded and what is computed, by what each was measured to cost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.vllm.weighing import Weigher
from tests.support.disks import Clock
from tiers.tier import TierName
from tiers.transfer.economy import (
    KINDS_OF_STEP,
    RETRY_EVERY,
    STEPS_OF_KIND,
    Cost,
    CostLine,
    LoadEconomy,
    PrefillCost,
)

HOST, DISK, REMOTE = TierName.HOST, TierName.DISK, TierName.REMOTE
SIZE = 16


def measured(*pairs):
    cost = Cost()
    for size, seconds in pairs:
        cost.observe(size, seconds)
    return cost.line


def economy_of(token_s):
    compute = PrefillCost()
    compute.observe([(0, 100)], 100 * token_s)
    return LoadEconomy(compute=compute)


def leading(economy, tiers, start=0, **each_s):
    loads = {TierName(tier): CostLine(0.0, seconds) for tier, seconds in each_s.items()}
    return economy.worth_leading(tiers, loads, block_bytes=1.0, block_tokens=1, start=start)


def test_a_cost_has_a_fixed_part_and_one_for_each_unit():
    assert CostLine(0.0, 0.5) == measured((4, 2.0)), "by one measurement nothing is fixed"
    fixed_s, each_s = measured((10, 2.0), (20, 3.0), (40, 5.0))
    assert (pytest.approx(1.0), pytest.approx(0.1)) == (fixed_s, each_s)
    fixed_s, each_s = measured((10, 5.0), (12, 4.5))
    assert each_s == 0.0 < fixed_s, "more work never costs less"
    assert CostLine() == measured((0, 1.0), (1, 0.0))


def test_what_got_much_cheaper_is_believed_at_once_and_what_got_dearer_soon():
    assert CostLine(0.0, 0.1) == measured(*[(10, 100.0)] * 5, (10, 1.0))
    assert measured((10, 1.0), *[(10, 100.0)] * 3).each_s > 8.0


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
        ([DISK] * 3, 0.95, 0),  # by less than the margin
        ([DISK] + [HOST] * 4, 2.0, 5),  # the first opens the way to the others
        ([HOST] + [DISK] * 4 + [HOST], 2.0, 1),
    ],
)
def test_as_many_blocks_are_loaded_as_save_the_most_time(tiers, disk, num_blocks):
    assert num_blocks == leading(economy_of(1.0), tiers, host=0.0, disk=disk)


def test_the_fixed_part_of_a_load_is_paid_once():
    loads = {DISK: CostLine(3.0, 0.5)}
    found = [
        economy_of(1.0).worth_leading(tiers, loads, block_bytes=1.0, block_tokens=1)
        for tiers in ([DISK] * 6, [DISK] * 9, [DISK] * 5 + [HOST] + [DISK] * 4)
    ]
    assert [0, 9, 10] == found


def test_a_token_far_into_a_prompt_is_worth_more_than_one_at_its_beginning():
    economy = LoadEconomy()
    for num in (100, 1000, 4000):
        economy.compute.observe([(0, num)], num + num * num / 2000)
    asked = ((1000, 0), (2000, 2000), (4000, 0))
    found = [leading(economy, [DISK] * num, start, disk=2.0) for num, start in asked]
    assert [0, 2000, 4000] == found, "the end pays for the beginning"


def test_steps_that_took_longer_than_a_larger_one_were_held_up_and_change_no_price():
    cost = PrefillCost()
    for num in (256, 512, 1024, *[128] * STEPS_OF_KIND):
        cost.observe([(0, num)], 60.0 if num == 128 else num / 100)
    assert pytest.approx(10.24, rel=1e-3) == cost.seconds(0, 1024)


MACHINES = st.tuples(st.floats(0, 0.05), st.floats(1e-5, 1e-2), st.floats(0, 1e-6))
PARTS = st.tuples(st.integers(0, 30_000), st.integers(1, 8192))
STEPS = st.lists(st.lists(PARTS, min_size=1, max_size=3), min_size=1, max_size=40)


def step_s(machine, parts):
    fixed_s, token_s, pair_s = machine
    return fixed_s + sum(num * (token_s + pair_s * (start + num / 2)) for start, num in parts)


@given(MACHINES, STEPS, st.data())
def test_no_steps_give_a_prompt_less_than_no_time_nor_more_memory(machine, steps, data):
    cost = PrefillCost()
    for parts in steps:
        cost.observe(parts, step_s(machine, parts) * data.draw(st.floats(0.1, 50)))
        assert cost.token_s >= 0 <= cost.pair_s
        assert 0 < cost.seconds(0, 1000) <= cost.seconds(0, 1001)
    assert len(cost._steps) <= KINDS_OF_STEP
    assert all(len(each) <= STEPS_OF_KIND for each in cost._steps.values())


@settings(max_examples=40)
@given(MACHINES, st.lists(st.floats(0.95, 1.05), min_size=40, max_size=40), st.data())
def test_what_a_prompt_takes_is_told_from_steps_of_which_some_were_held_up(machine, noise, data):
    """The first takes five times as long. Later one in ten is held up, and most compute the last
    tokens of a prompt. A noise of a twentieth, where it is worst, makes a fifth of the price."""
    cost, noises = PrefillCost(), iter(noise)
    cost.observe([(0, 512)], 5 * step_s(machine, [(0, 512)]))
    for length in (1024, 2048, 3968) * 2:
        cost.observe([(0, length)], step_s(machine, [(0, length)]) * next(noises))
    for number, noise_of_one in enumerate(noises):
        parts = [(data.draw(st.integers(0, 4000)), data.draw(st.integers(32, 127)))]
        cost.observe(parts, step_s(machine, parts) * noise_of_one * (1 if number % 10 else 4))
    for start, end in ((0, 1024), (0, 2048), (0, 3968), (2048, 3968)):
        whole_s = step_s(machine, [(start, end - start)])
        assert 0.8 * (whole_s - machine[0]) < cost.seconds(start, end) < 1.25 * whole_s


@pytest.fixture
def weigher():
    return Weigher(LoadEconomy(), Clock())


def step(weigher, scheduled, seconds, *, loads=False):
    weigher.begun(scheduled, loads=loads)
    weigher.clock_s.now_s += seconds
    weigher.ended()


def test_the_steps_of_prompts_tell_what_a_token_takes(weigher):
    step(weigher, [(70, 1), (80, 1)], 5.0)
    step(weigher, [(0, 20)], 5.0)
    step(weigher, [(0, 400)], 90.0, loads=True)
    weigher.ended()
    assert 0.0 == weigher.economy.compute.token_s, "answers, few tokens and loads tell nothing"
    for _ in range(20):
        step(weigher, [(0, 100), (900, 1)], 1.0 + 0.5)
        step(weigher, [(100, 200), (900, 1), (0, 100)], 3.0 + 0.5 * 9)
    assert pytest.approx(3.0 + 0.5 * 9, 0.02) == weigher.economy.compute.seconds(0, 300)


def test_steps_that_overlap_share_no_seconds(weigher):
    weigher.begun([(0, 100)], loads=False)
    weigher.begun([(100, 100)], loads=False)
    for _ in range(2):
        weigher.clock_s.now_s += 1.0
        weigher.ended()
    assert pytest.approx(2.0) == weigher.economy.compute.seconds(0, 200)


def test_a_load_from_below_is_copied_too(weigher):
    step(weigher, [(0, 100)], 100.0)

    def worth(tiers):
        return weigher.worth(tiers, {DISK: CostLine(0.0, 0.5)}, nbytes=SIZE, num_tokens=SIZE)

    assert 0 == worth([])
    assert 1 == worth([DISK])
    weigher.copied(SIZE, 0.6 * SIZE)
    assert (1, 0) == (worth([HOST]), worth([DISK]))


def test_after_many_refusals_slower_tiers_and_copies_are_measured_again_once(weigher):
    step(weigher, [(0, 100)], 100.0)
    weigher.copied(SIZE, 10 * SIZE)
    for _ in range(RETRY_EVERY):
        assert 0 == weigher.worth([HOST], {}, nbytes=SIZE, num_tokens=SIZE)
        assert not weigher.tries()
        weigher.slower()
    assert [True, False] == [weigher.tries(), weigher.tries()]
    assert 1 == weigher.worth([HOST], {}, nbytes=SIZE, num_tokens=SIZE)
