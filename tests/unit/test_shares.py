"""Shares of the engine and its queue: who is served next, whatever is cached for whom, and how long
the next one would wait."""

from array import array
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.queue import WaitingQueue
from engine.scheduling.sequence import Sequence
from engine.scheduling.shares import CREDIT, Backlog, BeginRate, ServedShares
from tests.support.requests import request
from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope


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


BOUND_NS = 10 * 10**9


def sequence(number: int) -> Sequence:
    asked = request([])
    chain = Chain(CacheScope().root(), [], 4)
    return Sequence(number, 0, asked, asked.params, chain, array("i"), 0)


def queue() -> WaitingQueue:
    return WaitingQueue(max_passed_s=BOUND_NS / 1e9, window=8)


def made_up_hits(salt: int, waiting: Sequence) -> int:
    return waiting.sequence_id * 7919 * salt % 11


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 4)), max_size=80))
def test_no_request_is_passed_by_for_longer_than_the_bound(turns):
    """Each turn: some arrive, one is admitted by an arbitrary rank, and seconds pass."""
    waiting, now_ns, number = queue(), 1, 0
    first_passed_ns: dict[int, int] = {}
    for arrivals, salt, seconds in turns:
        for _ in range(arrivals):
            number += 1
            waiting.add(sequence(number))
        candidates = waiting.candidates(now_ns, partial(made_up_hits, salt))
        assert {s.sequence_id for s in candidates} <= {s.sequence_id for s in waiting}
        if candidates:
            admitted = candidates[0]
            waiting.admit(admitted, now_ns)
            for passed in waiting:
                if passed.sequence_id < admitted.sequence_id:
                    first_ns = first_passed_ns.setdefault(passed.sequence_id, now_ns)
                    assert now_ns - first_ns < BOUND_NS
        now_ns += seconds * 10**9


def test_the_longest_cached_prefix_goes_first_and_age_decides_among_equals():
    waiting = queue()
    for number in range(4):
        waiting.add(sequence(number))
    cached = {0: 0, 1: 64, 2: 128, 3: 64}
    order = waiting.candidates(1, lambda s: cached[s.sequence_id])
    assert [2, 1, 3, 0] == [s.sequence_id for s in order]


def test_who_was_preempted_goes_before_all():
    waiting = queue()
    for number in range(3):
        waiting.add(sequence(number))
    victim = sequence(9)
    victim.num_preemptions = 1
    waiting.put_back(victim)
    assert [9, 2, 1, 0] == [s.sequence_id for s in waiting.candidates(1, lambda s: s.sequence_id)]
