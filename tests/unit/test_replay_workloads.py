"""Made-up traces are what they say: in order, the same for a seed, and prefix chains."""

import pytest

from tests.support.workloads import Agents, ChatLoad, Documents, Scan, make_trace

ALL = [ChatLoad(0.5), Agents(0.05), Scan(0.5), Documents(0.5, shift_s=200.0)]


def test_a_seed_gives_the_same_trace_and_another_another():
    first, again, other = (make_trace("t", ALL, duration_s=300.0, seed=s) for s in (1, 1, 2))
    assert first.requests == again.requests
    assert first.requests != other.requests


def test_requests_are_in_order_and_every_block_has_one_predecessor():
    trace = make_trace("t", ALL, duration_s=600.0, seed=3)
    times = [request.time_s for request in trace.requests]
    assert times == sorted(times)
    assert times[-1] < 600.0
    before: dict[object, object] = {}
    for request in trace.requests:
        parent = None
        for block in request.blocks:
            assert before.setdefault(block, parent) == parent
            parent = block
        assert (len(request.blocks) - 1) * 512 < request.input_tokens <= len(request.blocks) * 512


@pytest.mark.parametrize("workload", ALL, ids=lambda workload: type(workload).__name__)
def test_only_a_scan_has_no_reuse(workload):
    trace = make_trace("t", [workload], duration_s=600.0, seed=4)
    num_accesses = sum(len(each.blocks) for each in trace.requests)
    assert (num_accesses > trace.working_set_blocks()) is not isinstance(workload, Scan)
