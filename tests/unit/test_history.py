"""What the rings keep, and what series over them say."""

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import InvalidRequest
from cachesvc.observability.history import MAX_POINTS, History
from cachesvc.observability.latency import BOUNDS_S, NAMES, percentile
from cachesvc.observability.snapshot import numbers, plain
from tiers.errors import MissReason
from tiers.histogram import Histogram
from tiers.tier import TierName, TierStats


class Clocked:
    """A history of a made-up server, one second after another."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0
        self.state: dict[str, Any] = {}
        self.histograms = {name: Histogram(BOUNDS_S) for name in NAMES}
        self.history = History(
            lambda: self.state,
            lambda: {name: each.spread() for name, each in self.histograms.items()},
            clock_s=lambda: self.now_s,
        )

    def tick(self, **state: Any) -> None:
        self.state = state
        self.history.sample()
        self.now_s += 1

    def read(self, *series: str, window_s: float = 60, since_s: float = 0) -> dict[str, Any]:
        return self.history.read(series, window_s=window_s, since_s=since_s)["series"]


def test_counters_grow_gauges_stand_and_shares_divide():
    server = Clocked()
    for second in range(4):
        server.tick(hits={"host": second * 3, "disk": second}, asked=second * 8, running=second)
    told = server.read(
        "value:running", "rate:hits.host", "delta:hits.*", "ratio:hits.*/asked", "rates:hits.*"
    )
    assert told == {
        "value:running": [1, 2, 3],
        "rate:hits.host": [3, 3, 3],
        "delta:hits.*": [4, 4, 4],
        "ratio:hits.*/asked": [0.5, 0.5, 0.5],
        "rate:hits.disk": [1, 1, 1],
    }


def test_a_clock_that_is_set_moves_no_sample(monkeypatch):
    """A page whose newest sample is of tomorrow would ask for nothing older until then."""
    now_s, ahead_s = time.time(), [0]
    monkeypatch.setattr("cachesvc.observability.history.time.time", lambda: now_s + ahead_s[0])
    still = {name: Histogram(BOUNDS_S).spread() for name in NAMES}
    history = History(lambda: {"running": 1}, lambda: still)
    for ahead_s[0] in (0, 86_400, -86_400, 0):
        history.sample()
    times = history.read(["value:running"], window_s=60)["times"]
    assert times == pytest.approx([now_s] * 3, abs=30)
    assert sorted(times) == times


def test_what_never_happened_is_zero_and_a_share_of_nothing_is_null():
    server = Clocked()
    server.tick(asked=1)
    server.tick(asked=1, late=5)
    assert server.read("rate:never", "ratio:never/asked", "delta:late") == {
        "rate:never": [0],
        "ratio:never/asked": [None],
        "delta:late": [5],
    }


def test_a_percentile_is_of_what_was_observed_between_two_times():
    server = Clocked()
    server.tick()
    for _ in range(100):
        server.histograms["ttft"].observe(0.1)
    server.tick()
    server.histograms["ttft"].observe(1.0)
    server.tick()
    server.tick()
    first, second, third = server.read("p50:latency.ttft")["p50:latency.ttft"]
    assert first == pytest.approx(0.1, rel=0.1)
    assert second == pytest.approx(1.0, rel=0.1)
    assert third is None


def test_the_next_answer_goes_on_where_the_last_ended():
    server = Clocked()
    for second in range(950):
        server.tick(done=second * 2)
    whole = server.history.read(["rate:done"], window_s=900)
    assert 8 == whole["step_s"]
    assert len(whole["times"]) <= MAX_POINTS
    assert {2} == set(whole["series"]["rate:done"])
    for second in range(950, 970):
        server.tick(done=second * 2)
    later = server.history.read(["rate:done"], window_s=900, since_s=whole["times"][-1])
    assert [whole["times"][-1] + 8 * step for step in (1, 2, 3)] == later["times"]
    nothing = server.history.read(["rate:done"], window_s=900, since_s=later["times"][-1])
    assert [] == nothing["times"] == nothing["series"]["rate:done"]


@pytest.mark.parametrize(
    ("age_s", "window_s", "step_s"),
    [
        (30, 300, 1),
        (720, 300, 3),
        (720, 7 * 86_400, 6),
        (2000, 3 * 3600, 20),
        (2000, 7 * 86_400, 20),
    ],
)
def test_a_long_window_shows_all_that_a_young_server_has(age_s, window_s, step_s):
    """A week's own points are an hour and a half apart, and a server of twelve minutes has none."""
    server = Clocked()
    for second in range(age_s):
        server.tick(done=second)
    told = server.history.read(["rate:done"], window_s=window_s)
    assert step_s == told["step_s"] and len(told["times"]) <= MAX_POINTS
    assert {1} == set(told["series"]["rate:done"])
    shown_s = told["times"][-1] - told["times"][0]
    assert min(age_s, window_s) == pytest.approx(shown_s, abs=3 * step_s)


def test_one_number_over_a_window():
    server = Clocked()
    for second in range(100):
        server.tick(done=second if second < 50 else 50, running=second)
    told = server.history.over(["rate:done", "value:running", "p50:latency.load"], window_s=60)
    assert 99 == told["value:running"]
    assert told["rate:done"] == pytest.approx((50 - 39) / 60, rel=0.02)
    day = server.history.over(["delta:done"], window_s=86_400)
    assert {"delta:done": 50} == day, "all of it, though the day has hardly begun"
    assert told["p50:latency.load"] is None
    assert {"rate:done": None} == Clocked().history.over(["rate:done"], window_s=60)


@pytest.mark.parametrize(
    "series", ["done", "sum:done", "p999:latency.ttft", "p50:latency.nothing", "rate:"]
)
def test_a_series_that_cannot_be_read_is_refused_with_what_would_do(series):
    with pytest.raises(InvalidRequest, match=r"traffic\.generation_tokens|latency\.ttft"):
        Clocked().read(series)


@given(st.lists(st.floats(0.001, 500), min_size=1), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_percentile_lies_in_the_bucket_of_the_true_one(values, share):
    histogram = Histogram(BOUNDS_S)
    for value in values:
        histogram.observe(value)
    true = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    found = percentile(histogram.spread().counts, share)
    assert true / 2**0.25 <= found * (1 + 1e-9)
    assert found <= true * 2**0.25 * (1 + 1e-9)


def test_snapshots_become_json_and_paths():
    tier = TierStats(TierName.DISK, num_blocks=2, faults={MissReason.CHECKSUM: 3})
    told = plain({("a", TierName.HOST): 1, ("a", "b"): b"\x01", "tier": tier})
    assert {"host": 1, "b": "01"} == told["a"]
    found = dict(numbers(told))
    assert 3 == found["tier.faults.checksum"]
    assert "tier.name" not in found


def test_a_ring_that_is_behind_with_its_names_is_read_all_the_same():
    """Names come up by the second, and a coarser ring hears of them later."""
    server = Clocked()
    for _ in range(901):
        server.tick(requests=1.0)
    server.tick(requests=2.0, **{f"n{number}": 3.0 for number in range(200)})
    assert 3 == server.read("value:n199", window_s=60)["value:n199"][-1]
    assert {0} == set(server.read("value:n199", window_s=3 * 3600)["value:n199"])
