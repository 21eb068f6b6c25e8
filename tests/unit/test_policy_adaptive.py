"""The adaptive policy: it learns, it is held to LRU, and its memory is bounded."""

import pytest

from tests.support.workloads import Agents, ChatLoad, Documents, Scan, make_trace
from tiers.policy.adaptive import Adaptive
from tiers.policy.policy import Use
from tiers.policy.reuse_model import NUM_AGES, ReuseModel, WaitOutcome, interval, row
from tiers.policy.shadow import ShadowLru
from tiers.replay.replay import TierPlan, replay
from tiers.replay.trace import Trace


def hit_rates(trace: Trace, capacity: int, *policies: str) -> list[float]:
    return [replay(trace, [TierPlan("cache", capacity, name)]).hit_rate for name in policies]


WORKLOADS = {
    "chat": [ChatLoad(conversations_per_s=0.5)],
    "agents and a scan": [Agents(loops_per_s=0.05), Scan(prompts_per_s=1.0)],
    "documents that change": [Documents(questions_per_s=1.5, shift_s=400.0)],
    "a burst of scans": [ChatLoad(0.3), Scan(prompts_per_s=3.0, start_s=500.0, end_s=800.0)],
}


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("share", [0.01, 0.05, 0.25])
def test_never_half_a_point_under_lru(name, share):
    """Whatever the load and the capacity, also while the load changes."""
    trace = make_trace(name, WORKLOADS[name], duration_s=1200.0, seed=3)
    capacity = max(1, round(share * trace.working_set_blocks()))
    lru, adaptive = hit_rates(trace, capacity, "lru", "adaptive")
    assert adaptive > lru - 0.005


def test_closes_a_third_of_the_gap_where_reuse_can_be_told():
    """A scan beside agents: what is never used again looks unlike what is."""
    trace = make_trace("mix", [Agents(0.08), Scan(1.0)], duration_s=1800.0, seed=5)
    capacity = round(0.01 * trace.working_set_blocks())
    lru, adaptive, limit = hit_rates(trace, capacity, "lru", "adaptive", "min")
    assert adaptive - lru > (limit - lru) / 3


def test_what_left_often_returns_is_remembered_by_its_head():
    """A run that was evicted whole comes back as the same node, with its history."""
    policy = Adaptive[int](capacity_blocks=4)
    chain = [1, 2, 3, 4]
    for now_s in (0.0, 10.0, 20.0):
        use = Use(now_s, 4)
        for depth in (3, 2, 1, 0):
            policy.insert(chain[depth], use, chain[depth - 1] if depth else None, depth)
        assert policy.coldest(1) == [4]
        assert policy._nodes[1].uses == 1 + now_s / 10
        assert sorted(filter(None, (policy.victim() for _ in range(5)))) == chain


def test_a_run_that_was_never_judged_is_not_learned_from():
    """A chain of more runs than one request judges, whose first block has left by itself."""
    policy, known = Adaptive[int](capacity_blocks=1000), set[int]()

    def serve(now_s: float, chain: list[int]) -> None:
        use = Use(now_s, len(chain))
        for depth in reversed(range(len(chain))):
            if chain[depth] in known:
                policy.touch(chain[depth], use)
            else:
                policy.insert(chain[depth], use, chain[depth - 1] if depth else None, depth)
        known.update(chain)

    turns = list(range(60))
    for number in range(6, 60):
        serve(float(number), turns[:number])
    policy.remove(0)
    known.remove(0)
    serve(100.0, turns)
    for number in range(200):
        serve(200.0 + number * 60, [1000 + number])
    assert policy.victim() is not None


def test_a_branch_splits_a_run_and_keeps_the_history_of_both():
    policy = Adaptive[int](capacity_blocks=16)
    for now_s, chain in ((0.0, [1, 2, 3, 4]), (1.0, [1, 2, 7, 8])):
        use = Use(now_s, 4)
        for depth in (3, 2, 1, 0):
            if chain[depth] in policy._nodes:
                policy.touch(chain[depth], use)
            else:
                policy.insert(chain[depth], use, chain[depth - 1] if depth else None, depth)
    policy.coldest(0)
    stem, rest = policy._nodes[1], policy._nodes[3]
    assert (stem.blocks, stem.uses, stem.num_children) == ([1, 2], 2, 2)
    assert (rest.blocks, rest.uses, rest.parent) == ([3], 1, stem)
    assert policy._nodes[4].parent is rest


def test_a_parent_that_is_worth_nothing_waits_for_its_children():
    policy = Adaptive[int](capacity_blocks=8)
    use = Use(0.0, 3)
    for key, parent, depth in ((3, 2, 2), (2, 1, 1), (1, None, 0)):
        policy.insert(key, use, parent, depth)
    assert policy.coldest(9) == [3], "the tail is a node of its own"
    stem = policy._nodes[1]
    stem.levels = bytes(NUM_AGES)
    policy._place(stem)
    assert [policy.victim() for _ in range(4)] == [3, 2, 1, None]


def test_ghosts_and_waits_are_bounded():
    """A scan without end leaves no more than the stated memory."""
    policy = Adaptive[int](capacity_blocks=8)
    policy._max_ghosts = 100
    for number in range(1000):
        policy.insert(number, Use(float(number), 1))
        if number >= 8:
            policy.victim()
    assert len(policy._ghosts) <= 100
    assert len(policy._nodes) == len(policy._recency) == 8


def test_the_model_learns_when_reuse_comes():
    """Rows that are always used again after 20 s are worth more than those that never are."""
    model = ReuseModel(num_features=2)
    used, unused = (1, 0), (2, 0)
    age = interval(20.0)
    for _ in range(600):
        model.learn(WaitOutcome(used, 0, age + 1, True, 1.0))
        model.learn(WaitOutcome(unused, 0, age + 5, False, 1.0))
    of_used, of_unused = model.levels([used, unused])
    assert len(of_used) == NUM_AGES
    assert of_used[0] > of_unused[0]
    assert of_used[age] > of_used[0], "near its reuse a block is worth more than long before"


def test_before_any_evidence_the_model_is_lru():
    """Worth only falls with age."""
    (levels,) = ReuseModel(num_features=2).levels([(0, 0)])
    assert list(levels) == sorted(levels, reverse=True)


def test_rows_are_exact_below_four_and_octaves_above():
    assert [row(value) for value in (0, 1, 2, 3, 4, 7, 8, 1e9)] == [0, 1, 2, 3, 4, 4, 5, 15]


def test_the_shadow_is_ahead_only_beyond_the_regret():
    shadow = ShadowLru[int](capacity_blocks=4, regret=0.1, memory=1000)
    shadow.use([1, 2], num_hit=0)
    assert not shadow.is_ahead
    shadow.use([1, 2], num_hit=0)  # LRU has both
    assert shadow.is_ahead
    for _ in range(20):
        shadow.use([1, 2], num_hit=2)
    assert not shadow.is_ahead


def test_a_request_costs_no_more_than_so_much_however_many_nodes_it_meets():
    """A prompt that many others branched off, after a pause in which every node grew older."""
    policy, chain = Adaptive[int](capacity_blocks=10_000), list(range(600))
    for number in range(1, 600):  # each uses one block more, so that every block is a node
        use = Use(float(number), number + 1)
        for depth in range(number, -1, -1):
            if chain[depth] in policy._nodes:
                policy.touch(chain[depth], use)
            else:
                policy.insert(chain[depth], use, chain[depth - 1] if depth else None, depth)
        policy.coldest(0)
    before, use = policy.num_judged, Use(1e6, 600)
    for depth in range(599, -1, -1):
        policy.touch(chain[depth], use)
    assert policy.coldest(1) == [599]
    assert len({id(policy._nodes[key]) for key in chain}) > 500
    assert policy.num_judged - before == 32
    assert policy._num_learned <= 64 and policy._num_aged <= 384
    assert policy._nodes[0].uses == 600
