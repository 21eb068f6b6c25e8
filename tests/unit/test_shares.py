"""Shares of the engine: who is served next, and how long the next one would wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.shares import CREDIT, Backlog, BeginRate, ServedShares


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), max_size=200))
def test_shares_that_always_ask_are_served_alike(works):
    """The least served one is charged next: no two part by more than the largest charge."""
    served = ServedShares()
    for share in "abc":
        served.enter(share)
    for _, work in works:
        served.charge(min("abc", key=served.__getitem__), work)
    parts = [served[share] for share in "abc"]
    assert max(parts) - min(parts) <= 100


def test_who_was_away_is_paid_for_a_first_prompt_and_no_more():
    served = ServedShares()
    served.enter("busy")
    served.charge("busy", 10_000)
    served.enter("new")
    assert served["busy"] - CREDIT == served["new"]


def test_coming_and_going_wins_no_more_than_the_credit():
    served, work = ServedShares(), {"stays": 0, "comes": 0}
    served.enter("stays")
    for _ in range(500):
        served.enter("comes")
        least = min(work, key=served.__getitem__)
        served.charge(least, 100)
        work[least] += 100
        served.leave("comes")
    assert abs(work["comes"] - work["stays"]) <= CREDIT + 100


def test_who_leaves_and_comes_back_at_once_is_no_newcomer():
    served = ServedShares()
    for share in ("storm", "polite"):
        served.enter(share)
    served.charge("storm", 500)
    served.leave("storm")
    served.enter("storm")
    assert 500 == served["storm"] - served["polite"]


def test_idle_shares_are_forgotten_when_nothing_is_owed():
    served = ServedShares()
    served.enter("always")
    for number in range(1000):
        served.enter(str(number))
        served.charge(str(number), 1)
        served.leave(str(number))
        served.charge("always", CREDIT)
    assert len(served._served) < 5


def test_lines_take_turns_by_what_they_would_have_been_served():
    served = ServedShares()
    served.charge("a", 10)
    lines = {"a": [1, 2, 3], "b": [4, 5, 6]}
    works = {"a": [10.0, 10.0, 10.0], "b": [10.0, 10.0, 10.0]}
    assert [4, 1, 5, 2, 6, 3] == list(served.merged(lines, works))


def test_a_newcomer_waits_for_a_part_of_the_backlog_and_its_owner_for_all():
    backlog = Backlog({"storm": 10_000.0, "polite": 100.0}, tokens_per_s=100.0)
    assert 101.0 == backlog.wait_s("storm", 1000)
    assert 3.0 == backlog.wait_s("polite", 100)
    assert 2.0 == backlog.wait_s("new", 100)
    others = Backlog({"storm": 10_000.0}, 100.0, {"storm": 60.0, "polite": 40.0})
    assert 10_000 / 60 == others.wait_s("storm", 0), "what the other takes, it will go on taking"
    assert 0.0 == Backlog({}, 100.0).wait_s("new", 100)
    assert 0.0 == Backlog({"storm": 10_000.0}, None).wait_s("storm", 100)


def test_the_rate_is_measured_while_somebody_waits():
    rate, second = BeginRate(), 10**9
    rate.look(1, {})
    rate.begun("a", 1000)  # nobody waited: what the engine could do is not known
    rate.look(second, {"a": 1.0})
    for step in range(1, 5):
        rate.begun("a", 50)
        rate.look(second + step * second // 4, {"a": 1.0})
    assert 200.0 == rate.backlog({}).tokens_per_s
    rate.look(3 * second, {})
    rate.look(100 * second, {"a": 1.0})
    rate.look(109 * second, {"a": 1.0})
    assert 200.0 == rate.backlog({}).tokens_per_s
    rate.look(111 * second, {"a": 1.0})  # nothing began for long
    assert 120.0 == pytest.approx(rate.backlog({}).tokens_per_s)
