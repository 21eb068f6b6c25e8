"""The waiting queue alone: who may be admitted next, whatever is cached for whom."""

from array import array
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.queue import WaitingQueue
from engine.scheduling.sequence import Sequence
from tests.support.requests import request
from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope

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
