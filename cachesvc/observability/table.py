"""The one table of metrics: each row has a name, its meaning and labels, and how it is read.

Rows with an empty `read` are observed by `metrics`. The others are read from a snapshot at each
scrape, on the thread that scrapes. Names get the prefix `cachesvc_`.

Counters of possible events are exported from the start. If a counter appeared with its first event,
Prometheus' `increase` would miss the first fault.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import cachesvc
from cachesvc.observability.snapshot import Sources, shard_states
from engine.request import FinishReason
from tiers.errors import FAULTS, MissReason
from tiers.histogram import Spread
from tiers.telemetry.events import CacheEvent
from tiers.tier import MEMORY, Cause, TierName, TierStats

if TYPE_CHECKING:
    from tiers.node.counters import NodeCounters
    from tiers.policy.quota import GroupUse
    from tiers.stats import CacheStats

Kind = Literal["counter", "gauge", "histogram"]
Number = float | Spread
Values = Number | Mapping[tuple[str, ...], Number]  # of a metric with labels by their values
_NS = 1e9  # in a second
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metric(NamedTuple):
    """A row. `read` is an attribute of its source, or a function of it. `buckets` are the upper
    bounds of an observed histogram; one from a snapshot has its own. `at_zero` are values of its
    label that are exported before the first is observed."""

    kind: Kind
    name: str
    read: str | Callable[[Any], Values]
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    at_zero: tuple[str, ...] = ()


class MetricSample(NamedTuple):
    """One value of a metric fed by a snapshot; a `Spread` of a histogram."""

    name: str
    labels: tuple[str, ...]
    value: Number


def _row(
    kind: Kind,
    suffix: str,
    name: str,
    read: str | Callable[[Any], Values],
    meaning: str,
    *labels: str,
    buckets: tuple[float, ...] = (),
    at_zero: Iterable[str] = (),
) -> Metric:
    whole = f"cachesvc_{name}{suffix}"
    return Metric(kind, whole, read, meaning, labels, buckets, tuple(at_zero))


gauge = partial(_row, "gauge", "")
counter = partial(_row, "counter", "_total")
spread = partial(_row, "histogram", "_seconds")

OBSERVED = (
    counter(
        "http_requests",
        "",
        "HTTP requests, by route and status code; 499 is a client that left before its answer",
        *("route", "code"),
    ),
    spread("http_request", "", "From first byte in to last byte out", "route", buckets=_LONG),
    counter("requests", "", "Requests that left the engine", "finish", at_zero=FinishReason),
    counter(
        "prompt_tokens",
        "",
        "Prompt tokens, by where their KV was at admission; source=computed are the misses",
        "source",
        at_zero=(*TierName, "computed"),
    ),
    counter("generation_tokens", "", "Tokens generated"),
    counter("miss_tokens", "", "Prompt tokens computed, by reason", "reason", at_zero=MissReason),
    spread(
        "time_to_first_token",
        "",
        "From a request's arrival to its first token; hit_class is the slowest tier that "
        "served a part of the prompt, or cold",
        "hit_class",
        buckets=_LONG,
        at_zero=("cold", *TierName),
    ),
    spread("inter_token", "", "Between two tokens of one sequence", buckets=_FAST),
    spread("queue", "", "From arrival to admission", buckets=_LONG),
    spread("load", "", "From admission until the prefix is on the device", buckets=_FAST),
    spread("prefill", "", "From then to the first token", buckets=_LONG),
    spread("request", "", "From arrival to the last token", buckets=(*_LONG, 300.0)),
    counter("billed_units", "", "Charged, in 1e-12 of the currency unit", "class", "currency"),
    counter("saved_units", "", "Savings of hits over misses, in 1e-12 of the unit", "currency"),
)
SERVER = (
    gauge(
        "build_info",
        lambda now: {(cachesvc.__version__, now.model): 1},
        "Always 1; names the running version and the model that the server serves",
        *("version", "model"),
    ),
    counter(
        "invariant_violations",
        lambda now: _by_word(now.violations()),
        "Invariants found broken while running; anything but 0 is a bug",
        "invariant",
    ),
)
ENGINE = (
    gauge("running_requests", "num_running", "Sequences that prefill or decode now"),
    gauge("waiting_requests", "num_waiting", "Sequences in the waiting queue"),
    gauge("loading_requests", "num_loading", "Sequences whose prefix is being promoted"),
    counter("preemptions", "num_preemptions", "Sequences sent back to the waiting queue"),
    counter("steps", "num_steps", "Steps of the engine"),
    counter(
        "prefill_tokens",
        "prompt_tokens_computed",
        "Tokens that prefill computed, including those recomputed after a preemption",
    ),
    counter("jumped_tokens", "jumped_tokens", "Generated tokens that a grammar forced"),
)
# Under vLLM's names, for routers made for it, which send a prompt where fewest wait.
VLLM = tuple(
    Metric("gauge", f"vllm:{name}", read, meaning, ("model_name",))
    for name, read, meaning in (
        ("num_requests_running", "num_running", "As cachesvc_running_requests"),
        ("num_requests_waiting", "num_waiting", "As cachesvc_waiting_requests"),
        (
            "kv_cache_usage_perc",
            lambda e: e.cache.device.used_bytes / (e.cache.device.capacity_bytes or 1.0),
            "Share of the device tier in use, 0 to 1",
        ),
    )
)
# Of an engine at a URL, which is the first label of each, and of the model that it computes.
_OF_ENGINE = ("engine", "model")
ENGINES = (
    gauge("engine_up", "is_up", "1 while an engine at a URL answers", *_OF_ENGINE),
    gauge("engine_requests", "num_in_flight", "Requests in flight at the engine", *_OF_ENGINE),
    counter("engine_prompt_tokens", "prompt_tokens", "Prompt tokens of answers begun", *_OF_ENGINE),
    counter("engine_hit_tokens", "hit_tokens", "Those of them that it had cached", *_OF_ENGINE),
    counter("engine_errors", "errors", "Requests that met a fault of the engine", *_OF_ENGINE),
)
# Of a tier, which is the first label of each.
TIER = (
    gauge("cache_blocks", "num_blocks", "Blocks held", "tier"),
    gauge("cache_bytes", "used_bytes", "Bytes in use, which the capacity limits", "tier"),
    gauge("cache_logical_bytes", "logical_bytes", "Bytes of KV of the held blocks", "tier"),
    gauge("cache_capacity_bytes", "capacity_bytes", "Capacity of the tier at present", "tier"),
    counter("tier_served_blocks", "hits", "Blocks a tier served", "tier"),
    counter("tier_missed_blocks", "misses", "Blocks asked of a tier and not served", "tier"),
    counter(
        "tier_faults",
        lambda t: _by_word({} if t.name in MEMORY else dict.fromkeys(FAULTS, 0), t.faults),
        "Blocks a tier could not serve or store because of a fault",
        *("tier", "reason"),
    ),
    counter(
        "evictions",
        lambda t: _by_word(dict.fromkeys(Cause, 0), t.lives.causes),
        "Blocks that left a tier: for room, a quota, age, on request, as redundant, by a fault",
        *("tier", "cause"),
    ),
    spread("block_lifetime", "lives.lifetime", "From a block's arrival until it leaves", "tier"),
    spread("block_idle", "lives.idle", "From a block's last use until it leaves", "tier"),
    spread("block_reuse_gap", "lives.reuse_gap", "From one use of a block to the next", "tier"),
)
DISK = (
    gauge(
        "disk_setting_bytes",
        lambda t: {(): t.setting_bytes} if t.setting_bytes else {},
        "Capacity of the disk tier as set; more than at present if its file system lacks room",
    ),
    gauge(
        "disk_map_bytes",
        lambda t: {(each.name,): each.map_bytes for each in t.shards if each.ready},
        "Maximum size of a shard's file",
        "shard",
    ),
    gauge(
        "disk_map_used_bytes",
        lambda t: {(each.name,): each.used_bytes for each in t.shards if each.ready},
        "Bytes in used pages of a shard's map",
        "shard",
    ),
    gauge(
        "disk_shards",
        lambda t: _by_word(shard_states(t.shards) if t.shards else {}),
        "Shards of the disk tier: ready, read while checked, or unusable",
        "state",
    ),
)
# Of recurrent states.
CHECKPOINTS = (
    gauge("checkpoints", "num_blocks", "Checkpoints that a tier holds", "tier"),
    gauge("checkpoint_bytes", "used_bytes", "Bytes that checkpoints take", "tier"),
    gauge("checkpoint_capacity_bytes", "capacity_bytes", "Bytes that checkpoints may take", "tier"),
)
CACHE = (
    counter(
        "cache_events",
        lambda c: _events(c),
        "What happened to blocks in a tier",
        *("tier", "event"),
    ),
    counter(
        "transfer_bytes",
        lambda c: _moved_bytes(c),
        "Bytes of KV moved between tiers, as stored in the slower one",
        *("from", "to"),
    ),
    spread(
        "transfer",
        lambda c: {lane: moved.seconds for lane, moved in c.transfers.items()},
        "Each copy or disk job between tiers, of one block or several",
        *("from", "to"),
    ),
    gauge("load_bytes_per_second", "load_bytes_per_s", "Rate of one disk reader, smoothed"),
    gauge("prefill_tokens_per_second", "prefill_tokens_per_s", "Rate of prefill, smoothed"),
    counter("loads_refused", "loads_refused", "Loads not done because computing seemed faster"),
    gauge(
        "pinned_bytes",
        lambda c: c.pinned_blocks * c.block_bytes,
        "Bytes of KV that are pinned, in any tier",
    ),
    gauge(
        "pinnable_bytes",
        lambda c: c.pinnable_blocks * c.block_bytes,
        "Bytes of KV that can be pinned",
    ),
    counter("events_missed", "events_missed", "Block events dropped for slow listeners"),
)
# Of an engine's cache and of a node alike.
SHARED = (
    counter("collisions", "collisions", "Equal keys of different blocks; each was a miss"),
    gauge("pins", "num_pins", "Prefixes that operators pinned"),
    gauge("event_listeners", "num_listeners", "Listeners to the stream of block events"),
    gauge(
        "quota_used_bytes",
        lambda s: _by_group((use, use.used_bytes) for use in s.groups),
        "Bytes of a tier by the tenant or sharing group with a quota; common is all others",
        *("tier", "group"),
    ),
    gauge(
        "quota_share_bytes",
        lambda s: _by_group((use, use.share_bytes) for use in s.groups),
        "Bytes of a tier that other groups cannot evict",
        *("tier", "group"),
    ),
)
MONEY = (
    gauge("holds", "num_holds", "Open holds"),
    gauge("hold_age_seconds", "oldest_hold_s", "Age of the oldest open hold"),
    gauge(
        "ledger_drift_units",
        "drift_units",
        "Balances minus the sum of ledger entries, in 1e-12 units; anything but 0 is a bug",
    ),
    gauge(
        "tenant_balance",
        lambda m: {(t.tenant, t.currency): t.balance for t in m.tenants},
        "A tenant's balance, in its currency",
        *("tenant", "currency"),
    ),
    counter(
        "tenant_charged",
        lambda m: {(t.tenant, t.currency): t.charged for t in m.tenants},
        "What this server charged a tenant since its start",
        *("tenant", "currency"),
    ),
    gauge(
        "tenant_charged",
        lambda m: {
            (t.tenant, t.currency, period): amount
            for t in m.tenants
            for period, amount in (("day", t.today), ("month", t.this_month))
        },
        "What a tenant was charged in the current day or month (UTC) by all servers of the ledger",
        *("tenant", "currency", "period"),
    ),
)
LEDGER = (
    counter(
        "ledger_commands",
        lambda n: {("done",): n.commands - n.refused, ("refused",): n.refused},
        "Holds, their top-ups, settlements and deposits that the ledger processed",
        "outcome",
    ),
    counter("ledger_settled", "settled", "Requests charged"),
    counter(
        "ledger_reaped",
        lambda n: {("lapsed",): n.swept, ("crashed",): n.recovered},
        "Holds that ended without their request: with their lease, or by a crash of an earlier run",
        "reason",
    ),
    counter("ledger_commits", "batches", "Transactions of the ledger"),
    counter("ledger_failed_commits", "failed_batches", "Those that failed, with all commands"),
    counter("ledger_commit_seconds", lambda n: n.commit_ns / _NS, "Time in these transactions"),
    gauge("ledger_commit_seconds_max", lambda n: n.commit_ns_max / _NS, "The longest of them"),
    gauge("ledger_queue", "queued", "Commands waiting for the ledger"),
    gauge(
        "ledger_clock_skew_seconds",
        "clock_skew_s",
        "Difference of the host's clock from the right time; beyond 120 no hold is taken",
    ),
)
METRICS: Mapping[str, Metric] = {
    row.name: row
    for rows in (
        *(OBSERVED, SERVER, ENGINE, VLLM, ENGINES, TIER, DISK),
        *(CHECKPOINTS, CACHE, SHARED, MONEY, LEDGER),
    )
    for row in rows
}


def samples(now: Sources) -> Iterator[MetricSample]:
    engine, money = now.engine(), now.money()
    cache = engine.cache
    yield from _samples(SERVER, now)
    yield from _samples(ENGINE, engine)
    yield from _samples(VLLM, engine, now.model)
    for each in engine.engines:
        yield from _samples(ENGINES, each, each.url, each.model)
    for tier in _tiers(cache):
        yield from _samples(TIER, tier, tier.name)
        yield from _samples(DISK, tier)
    for tier in cache.checkpoints:
        yield from _samples(CHECKPOINTS, tier, tier.name)
    yield from _samples(CACHE, cache)
    yield from _samples(SHARED, cache)
    yield from _samples(MONEY, money)
    yield from _samples(LEDGER, money.ledger)


def node_samples(node: "NodeCounters") -> Iterator[MetricSample]:
    """Samples of a stand-alone node; none while it does not answer."""
    if not node:
        return
    yield MetricSample("cachesvc_build_info", (cachesvc.__version__, ""), 1)
    for tier in (node.host(), *node.below()):
        yield from _samples(TIER, tier, tier.name)
        yield from _samples(DISK, tier)
    for (name, event), count in node.events().items():
        yield MetricSample("cachesvc_cache_events_total", (name, event), count)
    totals = {name: node.total(name) for name in ("collisions", "num_pins")}
    told = SimpleNamespace(**totals, num_listeners=node.num_listeners, groups=node.groups())
    yield from _samples(SHARED, told)


def _samples(rows: Iterable[Metric], source: object, *first: str) -> Iterator[MetricSample]:
    """The rows' values. `first` are the values of their first labels."""
    for row in rows:
        read = (attrgetter(row.read) if isinstance(row.read, str) else row.read)(source)
        for labels, value in (read if isinstance(read, Mapping) else {(): read}).items():
            yield MetricSample(row.name, (*first, *labels), value)


def _tiers(cache: "CacheStats") -> "tuple[TierStats, ...]":
    return cache.device, cache.host, *cache.below


def _by_word(*counts: Mapping[Any, int]) -> dict[tuple[str, ...], Number]:
    return {(word,): count for each in counts for word, count in each.items()}


def _events(cache: "CacheStats") -> Mapping[tuple[str, ...], Number]:
    kinds = [(tier.name, event) for tier in _tiers(cache) for event in CacheEvent]
    return {each: cache.events.get(each, 0) for each in kinds}


def _moved_bytes(cache: "CacheStats") -> dict[tuple[str, ...], Number]:
    """What the tiers below count as they store it, and what moved within memory."""
    moved: dict[tuple[str, ...], Number] = {}
    for above, tier in pairwise((cache.host, *cache.below)):
        moved[tier.name, cache.host.name] = tier.read_bytes
        moved[above.name, tier.name] = tier.written_bytes
    within = {lane: each.nbytes for lane, each in cache.transfers.items() if {*lane} <= {*MEMORY}}
    return moved | within


def _by_group(uses: "Iterable[tuple[GroupUse, int]]") -> dict[tuple[str, ...], Number]:
    """Bytes by group. Scopes with the default quota are many, so they count as one group."""
    total: Counter[tuple[str, ...]] = Counter()
    for use, num_bytes in uses:
        name = use.group or "common"
        total[str(use.tier), "default" if name.startswith("scope:") else name] += num_bytes
    return dict(total)
