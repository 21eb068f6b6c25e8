"""The order of the waiting queue over whole loads, served by the real scheduler and cache."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.simulation import SimulatedRun, SimulatedServer, simulate
from tests.support.workloads import Agents, ChatLoad, make_trace
from tiers.replay.trace import Trace, read_trace

REAL = Path(__file__).parents[3] / "shared/traces/mooncake_conversation.jsonl.gz"


def public_load() -> Trace:
    if not REAL.exists():
        pytest.skip("the public trace is not beside the checkout")
    trace = read_trace(REAL)
    return replace(trace, requests=trace.requests[:600])


def made_load() -> Trace:
    return make_trace("made", [ChatLoad(2.0), Agents(0.2)], duration_s=120.0, seed=3)


def waits_s(run: SimulatedRun) -> list[float]:
    return [one.waited_s for one in run.served]


@pytest.mark.parametrize("load", [public_load, made_load])
@pytest.mark.parametrize("prefill_tokens_per_s", [30_000, 60_000])
def test_longest_cached_first_serves_more_and_lets_all_wait_shorter(load, prefill_tokens_per_s):
    trace = load()
    server = SimulatedServer(
        capacity_blocks=trace.working_set_blocks() // 8, prefill_tokens_per_s=prefill_tokens_per_s
    )
    by_arrival = simulate(trace, replace(server, by_arrival=True))
    cached_first = simulate(trace, server)
    assert cached_first.hit_rate > by_arrival.hit_rate
    assert sum(waits_s(cached_first)) < sum(waits_s(by_arrival))
    assert max(waits_s(cached_first)) <= max(waits_s(by_arrival)) + server.max_passed_s


def test_no_request_is_passed_by_for_longer_than_the_bound():
    """Of the public trace, whose requests hardly wait for each other's prefixes."""
    trace = public_load()
    for max_passed_s in (1.0, 5.0):
        server = SimulatedServer(
            capacity_blocks=2000, prefill_tokens_per_s=40_000, max_passed_s=max_passed_s
        )
        assert 0.0 < simulate(trace, server).passed_by_s() <= max_passed_s
        by_arrival = replace(server, by_arrival=True)
        assert simulate(trace, by_arrival).passed_by_s() == 0.0
