"""The whole server's state as one JSON value: `/admin/api/stats`, `cachesvc top` and the history.

Reads the published snapshots of engine, tiers and ledger on the event loop, without work on their
threads. Sizes are bytes, times seconds, amounts of money 1e-12 of the currency unit.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import cachesvc
from billing.group_commit import LedgerStats
from tiers.tier import ShardStats

if TYPE_CHECKING:
    from engine.stats import EngineStats
    from tiers.stats import CacheStats

Counters = Mapping[tuple[str, tuple[str, ...]], float]
_OWN_ROUTES = frozenset({"/admin", "/metrics", "/health", "/health/ready"})  # not clients' requests


class TenantMoney(NamedTuple):
    """A tenant's amounts in its currency. `charged` by this server since its start; `today` and
    `this_month` (UTC) by all."""

    tenant: str
    currency: str
    balance: float
    charged: float
    today: float
    this_month: float


@dataclass(frozen=True, slots=True)
class MoneyStats:
    """The ledger's snapshot: open holds, the age of the oldest, the drift, tenants' amounts, and
    its thread's counters."""

    num_holds: int = 0
    oldest_hold_s: float = 0.0
    drift_units: int = 0
    tenants: tuple[TenantMoney, ...] = ()
    ledger: LedgerStats = field(default_factory=LedgerStats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The sources of the current state. Each call is cheap and does not block."""

    engine: "Callable[[], EngineStats]"
    model: str = ""
    money: Callable[[], MoneyStats] = MoneyStats
    violations: Callable[[], Mapping[str, int]] = field(default=dict)
    started_s: float = field(default_factory=time.time)


def snapshot(sources: Sources, counters: Counters) -> dict[str, Any]:
    now_s = time.time()
    engine = sources.engine()
    engine_state: dict[str, Any] = plain(engine)
    del engine_state["cache"]
    return {
        "time_s": now_s,
        "uptime_s": now_s - sources.started_s,
        "version": cachesvc.__version__,
        "model": sources.model,
        "engine": engine_state,
        "cache": cache_state(engine.cache),
        "traffic": traffic(counters),
        "money": plain(sources.money()),
        "violations": dict(sources.violations()),
    }


def traffic(counters: Counters) -> dict[str, Any]:
    """The counters as `{metric: value}` or `{metric: {label: value}}`, without their prefix.

    `responses` counts answers to clients by status code, over all routes.
    """
    totals: dict[str, Any] = {}
    responses: dict[str, float] = {}
    for (metric, labels), value in counters.items():
        place = totals
        *parents, last = (metric.removeprefix("cachesvc_").removesuffix("_total"), *labels)
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
        if metric == "cachesvc_http_requests_total" and labels[0] not in _OWN_ROUTES:
            responses[labels[1]] = responses.get(labels[1], 0.0) + value
    return totals | {"responses": responses}


def cache_state(stats: "CacheStats") -> dict[str, Any]:
    state: dict[str, Any] = plain(stats)
    below = {tier["name"]: tier for tier in state.pop("below")}
    tiers = {name: state.pop(name) for name in ("device", "host")} | {"disk": below.get("disk")}
    shards = stats.disk.shards if stats.disk is not None else ()
    return state | {
        "checkpoints": {tier["name"]: tier for tier in state["checkpoints"]},
        "remote": below.get("remote"),
        "tiers": {name: tier for name, tier in tiers.items() if tier is not None},
        "shards": shard_states(shards),
    }


def shard_states(shards: Iterable[ShardStats]) -> dict[str, int]:
    """The number of shards that are in service, read-only while checked, or unusable: being
    replaced, or on a disk that takes no writes."""
    found = {"ready": 0, "checking": 0, "replacing": 0}
    for shard in shards:
        ready = shard.ready and not shard.failing
        found["ready" if ready else "checking" if shard.checking else "replacing"] += 1
    return found


def plain(value: Any) -> Any:
    """`value` as dicts, lists, strings and numbers.

    A dataclass becomes a dict by field. A mapping keyed by tuples becomes dicts within dicts, so
    that `{("disk", "host"): 3}` is `{"disk": {"host": 3}}`.
    """
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return _nested(value)
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    return value.hex() if isinstance(value, bytes) else str(value)


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in nested dicts, by its dotted path. Lists are skipped."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from numbers(each, f"{path}.{name}" if path else str(name))
    elif isinstance(value, int | float):
        yield path, float(value)


def _nested(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in mapping.items():
        *parents, last = key if isinstance(key, tuple) else (key,)
        place = nested
        for parent in parents:
            place = place.setdefault(str(plain(parent)), {})
        place[str(plain(last))] = plain(value)
    return nested
