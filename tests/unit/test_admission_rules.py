"""What is copied down, what stays below, and how much may be written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.policy.admission import (
    AUTO_KEEP_SHARE,
    Demotion,
    GhostList,
    Promotion,
    WriteBudget,
    WritePolicy,
)


@pytest.mark.parametrize(
    ("write_policy", "uses", "evict"),
    [
        (WritePolicy.ON_EVICT, [False, False], True),
        (WritePolicy.WRITE_THROUGH, [True, True], True),
        (WritePolicy.ON_SECOND_HIT, [False, True], False),
    ],
)
def test_when_a_block_is_copied_down(write_policy, uses, evict):
    demotion = Demotion[str](write_policy, num_ghosts=8)
    assert [demotion.on_use("a") for _ in range(2)] == uses
    assert demotion.on_evict("a") is evict


def test_a_second_use_counts_only_while_the_ghost_is_remembered():
    demotion = Demotion[str](WritePolicy.ON_SECOND_HIT, num_ghosts=2)
    assert [demotion.on_use(key) for key in "abca"] == [False, False, False, False]
    assert demotion.on_use("c")


def test_ghosts_are_forgotten_oldest_first():
    ghosts = GhostList[str](2)
    assert [ghosts.see(key) for key in "abac"] == [False, False, True, False]
    assert [key in ghosts for key in "abc"] == [True, False, True]
    assert len(ghosts) == 2


def test_auto_keeps_what_is_a_small_share_of_all_room():
    for above, keeps in ((100 * AUTO_KEEP_SHARE, True), (100 * AUTO_KEEP_SHARE + 1, False)):
        assert Promotion.AUTO.keeps(above, 100) is keeps
    assert Promotion.KEEP.keeps(10, 1)
    assert not Promotion.MOVE.keeps(1, 1000)


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 5000)), max_size=40))
def test_a_budget_is_never_exceeded(writes):
    """What was written is at most the burst and what was earned since the start."""
    budget = WriteBudget(bytes_per_day=86_400, burst_bytes=100)
    written, now_s = 0, 0.0
    for nbytes, pause_s in writes:
        now_s += pause_s
        if budget.take(nbytes, now_s):
            written += nbytes
        assert written <= 100 + now_s + 1e-6


def test_a_budget_fills_up_again_and_ignores_a_clock_that_steps_back():
    budget = WriteBudget(bytes_per_day=86_400, burst_bytes=100)
    assert budget.take(100, 0.0)
    assert not budget.take(10, 5.0)
    assert not budget.take(10, 1.0)
    assert budget.take(10, 11.5)
