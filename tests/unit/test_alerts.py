"""What the rules fire, by promtool, and what the dashboard shows of it."""

import asyncio
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.collaborators import Readiness
from cachesvc.observability.alerts import Alerts
from tests.support.stand_in import answering

RULES = Path(__file__).parents[2] / "ops" / "prometheus" / "rules.yml"
SHORT, LONG, DAY = 2, 9, 27  # hours of a case
PROMPTS = 'cachesvc_prompt_tokens_total{{instance="a", source="{}"}}'
Series = dict[str, str]


def steps(hours: int, minutes: int, before: float, after: float) -> str:
    """A gauge that changes so many minutes before the end."""
    return f"{before}x{hours * 60 - minutes - 1} {after}x{minutes}"


@dataclass(frozen=True)
class Case:
    """The last hours of one server, or of one currency, and what fires at their end. Its series
    call it "a"; it has another name beside other cases."""

    fires: set[str]
    series: Series
    id: str
    hours: int = SHORT
    label: str = "instance"  # that tells its alerts


def gauge(metric: str, minutes: int, value: float, fires: str = "") -> Case:
    """A gauge that was 0 and is `value` since so many minutes."""
    told = {metric: steps(SHORT, minutes, 0, value)}
    return Case({fires} - {""}, told, f"{metric.partition('{')[0]}-{minutes}m-{value}")


def traffic(now_hits: int, rate: int) -> Case:
    """A tenth is missed for a day; for the last half hour `now_hits` of each ten tokens hit."""
    at = DAY * 60 - 40

    def hits(minute: int) -> int:
        return rate * 6 * (9 * min(minute, at) + now_hits * max(0, minute - at))

    def misses(minute: int) -> int:
        return rate * 60 * minute - hits(minute)

    total = range(DAY * 60 + 1)
    series = {
        PROMPTS.format("device"): " ".join(str(hits(m)) for m in total),
        PROMPTS.format("computed"): " ".join(str(misses(m)) for m in total),
    }
    fires = {"HitRateDropped"} if now_hits < 4 and rate > 100 else set()
    return Case(fires, series, f"traffic-{now_hits}-{rate}", DAY)


def full_disk(used: int, hours: int, fires: str = "") -> Case:
    """A disk of 100 bytes with `used` of them for the last hours, which evicts a block a minute."""
    tier, evicted = '{instance="a", tier="disk"}', '{instance="a", tier="disk", event="evicted"}'
    series = {
        f"cachesvc_cache_bytes{tier}": steps(LONG, hours * 60, 50, used),
        f"cachesvc_cache_capacity_bytes{tier}": f"100x{LONG * 60}",
        f"cachesvc_cache_events_total{evicted}": f"0+1x{LONG * 60}",
    }
    return Case({fires} - {""}, series, f"disk-{used}-{hours}h", LONG)


def tenant(fires: set[str], *, month: float = 0, balance: float = 99, hours: str = "") -> Case:
    """A tenant of the example amounts: charged this month, its balance, and its hourly charges."""
    of = 'tenant="acme", currency="a"'
    series = {
        f'cachesvc_tenant_charged{{instance="a", {of}, period="month"}}': f"{month}x{DAY * 60}",
        f'cachesvc_tenant_balance{{instance="a", {of}}}': f"{balance}x{DAY * 60}",
        f'cachesvc_tenant_charged_total{{instance="a", {of}}}': hours or f"0x{DAY * 60}",
    }
    return Case(fires, series, f"tenant-{month}-{balance}-{hours}", DAY, "currency")


def spent(before: float, after: float) -> str:
    """What an hour costs, until the last one and in it."""
    calm = (DAY - 1) * 60
    return f"0+{before / 60}x{calm} {before * (DAY - 1)}+{after / 60}x59"


FAILED = 'cachesvc_ledger_failed_commits_total{instance="a"}'
SKEW = 'cachesvc_ledger_clock_skew_seconds{instance="a"}'
BROKEN = 'cachesvc_invariant_violations_total{instance="a", invariant="blocks"}'
FAULTS = 'cachesvc_tier_faults_total{instance="a", tier="disk", reason="checksum"}'
SHARDS = 'cachesvc_disk_shards{instance="a", state="checking"}'
HELD, WAITING = 'cachesvc_hold_age_seconds{instance="a"}', 'cachesvc_waiting_requests{instance="a"}'
ERRORS = 'cachesvc_engine_errors_total{instance="a", engine="http://a"}'
UP = 'cachesvc_engine_up{instance="a", engine="http://a"}'
CASES = [
    Case({"EngineDown"}, {UP: steps(SHORT, 3, 1, 0)}, "engine-down"),
    Case(set(), {UP: steps(SHORT, 9, 0, 1)}, "engine-up-again"),
    gauge(ERRORS, 10, 6, "EngineFails"),
    gauge(ERRORS, 10, 4),
    gauge(ERRORS, 20, 6),
    gauge('cachesvc_ledger_drift_units{instance="a"}', 5, -3, "LedgerDrift"),
    gauge(FAILED, 3, 9, "LedgerFails"),
    gauge(FAILED, 3, 2),
    gauge(FAILED, 20, 9),
    gauge(SKEW, 2, -121, "ClockSkew"),
    gauge(SKEW, 2, 119),
    gauge(BROKEN, 30, 1, "InvariantBroken"),
    gauge(BROKEN, 90, 1),
    gauge(FAULTS, 10, 2, "TierFaults"),
    gauge(FAULTS, 20, 2),
    gauge(SHARDS, 35, 1, "DiskShardNotReady"),
    gauge(SHARDS, 20, 1),
    gauge(HELD, 8, 3700, "HoldTooOld"),
    gauge(HELD, 3, 3700),
    gauge(WAITING, 15, 51, "QueueGrows"),
    gauge(WAITING, 6, 51),
    gauge(WAITING, 15, 50),
    traffic(3, 200),
    traffic(6, 200),
    traffic(3, 50),
    full_disk(96, 8, "DiskTierFull"),
    full_disk(94, 8),
    full_disk(96, 4),
    tenant(set(), month=399),
    tenant({"BudgetNearlySpent"}, month=400),
    tenant({"BudgetNearlySpent", "BudgetSpent"}, month=500),
    tenant(set(), balance=50),
    tenant({"BalanceLow"}, balance=49),
    tenant({"BalanceLow", "TopUpWanted"}, balance=19),
    tenant({"SpendingSpiked"}, hours=spent(1, 9)),
    tenant(set(), hours=spent(1, 2)),
    tenant(set(), hours=spent(0.1, 0.9)),
]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, from prometheus")
def test_prometheus_says_the_same(tmp_path):
    written = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [_told_to_promtool(hours) for hours in (SHORT, LONG, DAY)],
    }
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump(written))
    tested = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=100
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


FIRING = 'count by (alertname, instance, currency) (ALERTS{alertstate="firing"})'


def _told_to_promtool(hours: int) -> dict[str, Any]:
    """The cases of so many hours, side by side: a rule is evaluated once for all."""
    cases = [case for case in CASES if case.hours == hours]
    samples = [
        {"labels": f'{{alertname="{name}", {case.label}="{case.id}"}}', "value": 1}
        for case in cases
        for name in case.fires
    ]
    return {
        "name": f"{hours}h",
        "interval": "1m",
        "input_series": [
            {"series": name.replace('"a"', f'"{case.id}"'), "values": told}
            for case in cases
            for name, told in case.series.items()
        ],
        "promql_expr_test": [{"expr": FIRING, "eval_time": f"{hours}h", "exp_samples": samples}],
    }


OF_OURS = {
    "name": "TierFaults",
    "alerts": [
        {
            "state": state,
            "labels": {"severity": "ticket", "instance": state},
            "annotations": {"summary": f"it is {state}", "runbook": "ops/runbooks/tier-faults.md"},
        }
        for state in ("firing", "pending")
    ],
}
OF_OTHERS = {"name": "Other", "alerts": [{"state": "firing", "labels": {}, "annotations": {}}]}
GROUPS = [{"name": "cachesvc-alerts", "rules": [OF_OURS]}, {"name": "node", "rules": [OF_OTHERS]}]
READY = Readiness(True)


def shown(url: str = "", readiness: Readiness = READY, broken: int = 0) -> list[Any]:
    alerts = Alerts(url, lambda: readiness, lambda: {"blocks": broken})
    return [(each["alert"], each["summary"]) for each in asyncio.run(alerts.firing())]


def test_a_server_without_prometheus_shows_what_it_knows():
    assert [] == shown()
    degraded = Readiness(True, "", {"degraded": ["shard-0 cannot be used"], "running": 1})
    assert [("Degraded", "shard-0 cannot be used")] == shown(readiness=degraded)
    assert [("NotReady", "no ledger")] == shown(readiness=Readiness(False, "no ledger"))
    assert "InvariantBroken" == shown(broken=2)[0][0]


def test_the_dashboard_shows_what_prometheus_fires():
    with answering(200, json.dumps({"data": {"groups": GROUPS}}).encode()) as url:
        assert [("TierFaults", "it is firing")] == shown(url)
        assert ["InvariantBroken", "TierFaults"] == [name for name, _ in shown(url, broken=1)]


@pytest.mark.parametrize(("status", "body"), [(503, b""), (200, b"<html>"), (200, b"{}")])
def test_a_prometheus_that_does_not_say_is_an_alert(status, body):
    with answering(status, body) as url:
        [(name, summary)] = shown(url)
    assert "PrometheusSilent" == name
    assert url in summary
