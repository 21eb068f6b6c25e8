"""The dashboard's alerts say what Prometheus says of the same server."""

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from cachesvc.observability.alerts import ALERTS, firing_alerts
from cachesvc.observability.latency import BOUNDS_S, NAMES
from tests.unit.test_history import Clocked
from tiers.histogram import Histogram

RULES = Path(__file__).parents[2] / "ops" / "prometheus" / "rules.yml"
SPANS = {"s": 1, "m": 60, "h": 3600}
SHORT, LONG, DAY = 2, 9, 27  # hours of a case
PROMPTS = 'cachesvc_prompt_tokens_total{{instance="a", source="{}"}}'
State = Callable[[int], dict[str, Any]]  # of minutes since the start
Series = dict[str, str]


def steps(
    hours: int, minutes: int, before: float, after: float
) -> tuple[str, Callable[[int], float]]:
    """A gauge that changes so many minutes before the end: for promtool, and by minute."""
    at = hours * 60 - minutes
    return f"{before}x{at - 1} {after}x{minutes}", lambda m: after if m >= at else before


@dataclass(frozen=True)
class Case:
    """One server's last hours, and what fires at their end."""

    fires: set[str]
    series: Series
    state: State
    id: str
    hours: int = SHORT


def gauge(metric: str, path: str, minutes: int, value: float, fires: str = "") -> Case:
    """A gauge that was 0 and is `value` since so many minutes."""
    told, at = steps(SHORT, minutes, 0, value)

    def state(minute: int) -> dict[str, Any]:
        found: Any = at(minute)
        for name in reversed(path.split(".")):
            found = {name: found}
        return dict(found)

    return Case({fires} - {""}, {metric: told}, state, f"{metric}-{minutes}m-{value}")


def traffic(now_hits: int, rate: int) -> Case:
    """A tenth is missed for a day; for the last half hour `now_hits` of each ten tokens hit."""
    at = DAY * 60 - 40

    def hits(minute: int) -> int:
        return rate * 6 * (9 * min(minute, at) + now_hits * max(0, minute - at))

    def misses(minute: int) -> int:
        return rate * 60 * minute - hits(minute)

    def state(minute: int) -> dict[str, Any]:
        told = {"device": hits(minute), "computed": misses(minute)}
        return {"traffic": {"prompt_tokens": told}}

    total = range(DAY * 60 + 1)
    series = {
        PROMPTS.format("device"): " ".join(str(hits(m)) for m in total),
        PROMPTS.format("computed"): " ".join(str(misses(m)) for m in total),
    }
    fires = {"HitRateDropped"} if now_hits < 4 and rate > 100 else set()
    return Case(fires, series, state, f"traffic-{now_hits}-{rate}", DAY)


def full_disk(used: int, hours: int, fires: str = "") -> Case:
    """A disk of 100 bytes with `used` of them for the last hours, which evicts a block a minute."""
    told, at = steps(LONG, hours * 60, 50, used)
    tier, evicted = '{instance="a", tier="disk"}', '{instance="a", tier="disk", event="evicted"}'
    series = {
        f"cachesvc_cache_bytes{tier}": told,
        f"cachesvc_cache_capacity_bytes{tier}": f"100x{LONG * 60}",
        f"cachesvc_cache_events_total{evicted}": f"0+1x{LONG * 60}",
    }

    def state(minute: int) -> dict[str, Any]:
        tiers = {"disk": {"used_bytes": at(minute), "capacity_bytes": 100}}
        return {"cache": {"tiers": tiers, "events": {"disk": {"evicted": minute}}}}

    return Case({fires} - {""}, series, state, f"disk-{used}-{hours}h", LONG)


FAILED = 'cachesvc_ledger_failed_commits_total{instance="a"}'
CASES = [
    gauge('cachesvc_ledger_drift_units{instance="a"}', "money.drift_units", 5, -3, "LedgerDrift"),
    gauge(FAILED, "money.ledger.failed_batches", 3, 9, "LedgerFails"),
    gauge(FAILED, "money.ledger.failed_batches", 3, 2),
    gauge(FAILED, "money.ledger.failed_batches", 20, 9),
    gauge(
        'cachesvc_ledger_clock_skew_seconds{instance="a"}',
        "money.ledger.clock_skew_s",
        2,
        -121,
        "ClockSkew",
    ),
    gauge('cachesvc_ledger_clock_skew_seconds{instance="a"}', "money.ledger.clock_skew_s", 2, 119),
    gauge(
        'cachesvc_invariant_violations_total{instance="a", invariant="blocks"}',
        "violations.blocks",
        30,
        1,
        "InvariantBroken",
    ),
    gauge(
        'cachesvc_invariant_violations_total{instance="a", invariant="blocks"}',
        "violations.blocks",
        90,
        1,
    ),
    gauge(
        'cachesvc_tier_faults_total{instance="a", tier="disk", reason="checksum"}',
        "cache.tiers.disk.faults.checksum",
        10,
        2,
        "TierFaults",
    ),
    gauge(
        'cachesvc_tier_faults_total{instance="a", tier="disk", reason="checksum"}',
        "cache.tiers.disk.faults.checksum",
        20,
        2,
    ),
    gauge(
        'cachesvc_disk_shards{instance="a", state="checking"}',
        "cache.shards.checking",
        35,
        1,
        "DiskShardNotReady",
    ),
    gauge('cachesvc_disk_shards{instance="a", state="checking"}', "cache.shards.checking", 20, 1),
    gauge('cachesvc_hold_age_seconds{instance="a"}', "money.oldest_hold_s", 8, 3700, "HoldTooOld"),
    gauge('cachesvc_hold_age_seconds{instance="a"}', "money.oldest_hold_s", 3, 3700),
    gauge('cachesvc_waiting_requests{instance="a"}', "engine.num_waiting", 15, 51, "QueueGrows"),
    gauge('cachesvc_waiting_requests{instance="a"}', "engine.num_waiting", 6, 51),
    gauge('cachesvc_waiting_requests{instance="a"}', "engine.num_waiting", 15, 50),
    traffic(3, 200),
    traffic(6, 200),
    traffic(3, 50),
    full_disk(96, 8, "DiskTierFull"),
    full_disk(94, 8),
    full_disk(96, 4),
]


def after(state: State, hours: int) -> Clocked:
    """A history of so many hours: by the minute, at last by ten seconds and by the second."""
    server = Clocked()
    begin_s, end_s = server.now_s, hours * 3600
    second = 0
    while second <= end_s:
        server.history._ticks = second
        server.now_s = begin_s + second
        server.tick(**state(second // 60))
        left = end_s - second
        second += 1 if left <= 700 else 10 if left <= 3600 else 60
    return server


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_what_fires(case: Case) -> None:
    firing = firing_alerts(after(case.state, case.hours).history)
    assert case.fires == {each["alert"] for each in firing}
    assert all(each["summary"] for each in firing)


def test_a_fresh_server_raises_no_alarm() -> None:
    server = Clocked()
    assert [] == firing_alerts(server.history)
    server.tick(money={"drift_units": 5}, engine={"num_waiting": 99})
    server.tick(money={"drift_units": 5}, engine={"num_waiting": 99})
    assert [] == firing_alerts(server.history)


def test_a_restart_within_the_span_breaks_no_invariant() -> None:
    """Counters restart at 0. The fall is not growth, and earlier growth stays reported."""
    server = Clocked()
    server.histograms = {name: Histogram(BOUNDS_S) for name in NAMES}
    for broken in (3, 3, 0, 0):
        server.tick(violations={"blocks": broken})
    assert [] == firing_alerts(server.history)


def test_the_rule_file_has_the_same_alerts() -> None:
    rules = [
        rule
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    told = {
        rule["alert"]: (
            rule["labels"]["severity"],
            _seconds(rule.get("for", "0s")),
            rule["annotations"]["runbook"],
        )
        for rule in rules
    }
    assert told == {each.name: (each.severity, each.for_s, each.runbook) for each in ALERTS}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, from prometheus")
def test_prometheus_says_the_same(tmp_path: Path) -> None:
    written = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [_told_to_promtool(case) for case in CASES],
    }
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump(written))
    tested = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=100
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


def _told_to_promtool(case: Case) -> dict[str, Any]:
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(case.fires)]
    return {
        "name": case.id,
        "interval": "1m",
        "input_series": [{"series": name, "values": told} for name, told in case.series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{case.hours}h",
                "exp_samples": samples,
            }
        ],
    }


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)([smh])", text)
    assert found is not None, text
    return float(int(found[1]) * SPANS[found[2]])
