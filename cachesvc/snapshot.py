"""The whole server's state as one JSON value: `/admin/api/stats`, `cachesvc top` and the history.

Reads the snapshots that engine, tiers and ledger publish, on the event loop; asks none of them to
do anything. Sizes are bytes, times seconds, amounts of money 1e-12 of the currency unit.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import cachesvc
from cachesvc.metric_samples import MoneyStats
from engine.engine import EngineStats
from tiers.cache import CacheStats
from tiers.tier import TierStats

Counters = Mapping[tuple[str, tuple[str, ...]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the state of now is found; each call is cheap and blocks nothing."""

    model: str
    engine: Callable[[], EngineStats]
    money: Callable[[], MoneyStats]
    violations: Callable[[], Mapping[str, int]]
    counters: Callable[[], Counters]  # by metric and its label values
    started_s: float = field(default_factory=time.time)


def snapshot(sources: Sources) -> dict[str, Any]:
    """Everything, now."""
    now_s = time.time()
    engine = sources.engine()
    return {
        "time_s": now_s,
        "uptime_s": now_s - sources.started_s,
        "version": cachesvc.__version__,
        "model": sources.model,
        "engine": _engine(engine),
        "cache": _cache(engine.cache),
        "traffic": traffic(sources.counters()),
        "money": asdict(sources.money()),
        "violations": dict(sources.violations()),
    }


def traffic(counters: Counters) -> dict[str, Any]:
    """The counters as `{metric: value}` or `{metric: {label: value}}`, without their prefix."""
    told: dict[str, Any] = {}
    for (metric, labels), value in counters.items():
        place = told
        *parents, last = (metric.removeprefix("cachesvc_").removesuffix("_total"), *labels)
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return told


def _engine(stats: EngineStats) -> dict[str, Any]:
    told = asdict(stats)
    del told["cache"]
    return told


def _cache(stats: CacheStats) -> dict[str, Any]:
    told = asdict(stats)
    tiers = (stats.device, stats.host, stats.disk)
    events: dict[str, dict[str, int]] = {}
    for (tier, event), count in stats.events.items():
        events.setdefault(tier, {})[event] = count
    told["tiers"] = {str(tier.name): _tier(tier) for tier in tiers if tier is not None}
    for name in ("device", "host", "disk"):
        del told[name]
    return told | {"events": events}


def _tier(tier: TierStats) -> dict[str, Any]:
    told = asdict(tier)
    del told["name"]
    return told | {"faults": {str(reason): count for reason, count in tier.faults.items()}}
