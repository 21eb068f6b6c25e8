"""The alerts of `ops/prometheus/rules.yml`, evaluated over the server's own history.

For the dashboard of a server without Prometheus. Each function follows its rule. A test compares
names, severities, durations and runbooks with the file, and gives promtool the same series. Event
loop only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachesvc.observability.history import History
from cachesvc.observability.names import HIT_RATE, HIT_TOKENS, PROMPT_TOKENS

MINUTE_S, HOUR_S = 60.0, 3600.0

Floats = npt.NDArray[np.float64]
Firing = Callable[["Recent"], str | None]


class Recent:
    """The history in the form that rules need."""

    def __init__(self, history: History) -> None:
        self._history = history

    def points(self, series: Sequence[str], window_s: float) -> tuple[Floats, list[Floats]]:
        """Ages in seconds and the values of each series.

        Both are empty if the history does not reach back far enough.
        """
        found = self._history.read(series, window_s=window_s)
        times = np.array(found["times"], float)
        if not len(times) or times[-1] - times[0] < window_s - 2 * found["step_s"]:
            return np.zeros(0), [np.zeros(0) for _ in series]
        values = [np.array(found["series"][name], float) for name in series]
        return times[-1] - times, values

    def throughout(
        self, series: str, window_s: float, is_so: Callable[[Floats], npt.NDArray[np.bool_]]
    ) -> bool:
        """Whether the condition held for every value of the last `window_s` seconds."""
        _, (values,) = self.points([series], window_s)
        return bool(len(values) and is_so(values).all())

    def now(self, series: str) -> float:
        return self._history.over([series], window_s=MINUTE_S)[series] or 0.0

    def grown(self, series: str, window_s: float) -> dict[str, float]:
        """The counters that grew, by the last part of their names."""
        found = self._history.over([series], window_s=window_s)
        return {name: value for name, value in found.items() if value}


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule. `firing` returns what is wrong now, or None."""

    name: str
    severity: str
    for_s: float
    firing: Firing

    @property
    def runbook(self) -> str:
        words = "".join(f"-{c.lower()}" if c.isupper() else c for c in self.name)
        return f"ops/runbooks/{RUNBOOKS.get(self.name, words[1:])}.md"


def firing_alerts(history: History) -> list[dict[str, str]]:
    """The firing alerts, for the dashboard and `/admin/api/alerts`."""
    recent = Recent(history)
    return [
        {
            "alert": alert.name,
            "severity": alert.severity,
            "summary": summary,
            "runbook": alert.runbook,
        }
        for alert in ALERTS
        if (summary := alert.firing(recent)) is not None
    ]


def _ledger_drift(recent: Recent) -> str | None:
    drifts = recent.throughout("value:money.drift_units", MINUTE_S, lambda units: units != 0)
    return "Balances and holds do not sum to the ledger" if drifts else None


def _ledger_fails(recent: Recent) -> str | None:
    """Fires if more than a few commits failed in five minutes."""
    failed = recent.grown("deltas:money.ledger.failed_batches", 5 * MINUTE_S)
    fails = sum(failed.values()) > 5
    return "The ledger cannot be written: requests are refused" if fails else None


def _clock_skew(recent: Recent) -> str | None:
    skew_s = recent.now("value:money.ledger.clock_skew_s")
    return f"The clock is {skew_s:.0f} s off: requests are refused" if abs(skew_s) > 120 else None


def _invariant_broken(recent: Recent) -> str | None:
    broken = sorted(name.rpartition(".")[2] for name in recent.grown("deltas:violations.*", HOUR_S))
    return f"Broken invariants: {', '.join(broken)}" if broken else None


def _hit_rate_dropped(recent: Recent) -> str | None:
    """Compares the five-minute hit rate, over fifteen minutes, with that of a day before."""
    window_s, span_s = 15 * MINUTE_S, 5 * MINUTE_S
    ages_s, (hits, prompts) = recent.points(
        [f"delta:{HIT_TOKENS}", f"delta:{PROMPT_TOKENS}"], window_s + span_s
    )
    ages_before_s, (before,) = recent.points([HIT_RATE], 25 * HOUR_S)
    before = before[(ages_before_s > HOUR_S) & ~np.isnan(before)]
    if not len(ages_s) or not len(before):
        return None
    usual = before.mean()
    for age_s in ages_s[ages_s <= window_s]:
        inside = (ages_s >= age_s) & (ages_s < age_s + span_s)
        asked = prompts[inside].sum()
        if asked / span_s <= 100 or hits[inside].sum() / asked >= 0.5 * usual:
            return None
    return f"The hit rate is below half of the {usual:.0%} of the day before"


def _tier_faults(recent: Recent) -> str | None:
    faults = recent.grown("deltas:cache.tiers.*.faults.*", 15 * MINUTE_S)
    sources = sorted(" ".join(name.split(".")[-3::2]) for name in faults)
    return f"A tier faults: {', '.join(sources)}" if sources else None


def _disk_shard_not_ready(recent: Recent) -> str | None:
    series = "value:cache.shards.checking+cache.shards.replacing"
    lasts = recent.throughout(series, 30 * MINUTE_S, lambda shards: shards > 0)
    return "A disk shard has not taken blocks for 30 minutes" if lasts else None


def _disk_tier_full(recent: Recent) -> str | None:
    """Fires if the disk tier has been full for six hours and evicted in each of them."""
    disk = "cache.tiers.disk"
    series = [f"value:{disk}.used_bytes", f"value:{disk}.capacity_bytes"]
    ages_s, (used, capacity, evicted) = recent.points(
        [*series, "delta:cache.events.disk.evicted"], 7 * HOUR_S
    )
    late = ages_s <= 6 * HOUR_S
    if not len(ages_s) or (used[late] <= 0.95 * capacity[late]).any():
        return None
    evicting = [
        evicted[(ages_s >= age_s) & (ages_s < age_s + HOUR_S)].sum() > 0 for age_s in ages_s[late]
    ]
    return "The disk tier evicts; a larger one may pay" if all(evicting) else None


def _hold_too_old(recent: Recent) -> str | None:
    old = recent.throughout("value:money.oldest_hold_s", 5 * MINUTE_S, lambda age: age > 3600)
    return "A hold is older than any request should be" if old else None


def _queue_grows(recent: Recent) -> str | None:
    long = recent.throughout("value:engine.num_waiting", 10 * MINUTE_S, lambda num: num > 50)
    return "Requests wait faster than they are served" if long else None


RUNBOOKS = {"DiskShardNotReady": "tier-faults"}
ALERTS: Sequence[Alert] = (
    Alert("LedgerDrift", "page", MINUTE_S, _ledger_drift),
    Alert("LedgerFails", "page", 0, _ledger_fails),
    Alert("ClockSkew", "page", 0, _clock_skew),
    Alert("InvariantBroken", "page", 0, _invariant_broken),
    Alert("HitRateDropped", "ticket", 15 * MINUTE_S, _hit_rate_dropped),
    Alert("TierFaults", "ticket", 0, _tier_faults),
    Alert("DiskShardNotReady", "ticket", 30 * MINUTE_S, _disk_shard_not_ready),
    Alert("DiskTierFull", "info", 6 * HOUR_S, _disk_tier_full),
    Alert("HoldTooOld", "ticket", 5 * MINUTE_S, _hold_too_old),
    Alert("QueueGrows", "ticket", 5 * MINUTE_S, _queue_grows),
)
