"""Turns snapshots of engine, tiers and ledger into samples under the metrics' names.

Pure; called at each scrape, on the thread that scrapes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import cachesvc
from billing.group_commit import LedgerStats
from tiers.errors import FAULTS
from tiers.histogram import Spread
from tiers.telemetry.events import CacheEvent
from tiers.tier import MEMORY, Cause, ShardStats, TierStats

if TYPE_CHECKING:
    from engine.engine import EngineStats
    from tiers.node.counters import NodeCounters
    from tiers.operations.operations import GroupUse
    from tiers.stats import CacheStats

_SECOND = 1e9  # nanoseconds
# Counters of possible events are exported from the start. If a counter appeared with its first
# event, Prometheus' `increase` would miss the first fault.


class MetricSample(NamedTuple):
    """One value of a metric fed by a snapshot; a `Spread` of a histogram."""

    name: str
    labels: tuple[str, ...]
    value: float | Spread


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


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The sources of the current state, each called on the scraping thread."""

    engine: "Callable[[], EngineStats]"
    model: str = ""
    money: Callable[[], MoneyStats] = MoneyStats
    violations: Callable[[], Mapping[str, int]] = field(default=dict)


def samples(snapshots: Snapshots) -> Iterator[MetricSample]:
    yield MetricSample("cachesvc_build_info", (cachesvc.__version__, snapshots.model), 1)
    yield from _engine_samples(snapshots.engine())
    money = snapshots.money()
    yield MetricSample("cachesvc_holds", (), money.num_holds)
    yield MetricSample("cachesvc_hold_age_seconds", (), money.oldest_hold_s)
    yield MetricSample("cachesvc_ledger_drift_units", (), money.drift_units)
    yield from _ledger_samples(money.ledger)
    for each in money.tenants:
        of = (each.tenant, each.currency)
        yield MetricSample("cachesvc_tenant_balance", of, each.balance)
        yield MetricSample("cachesvc_tenant_charged_total", of, each.charged)
        yield MetricSample("cachesvc_tenant_charged", (*of, "day"), each.today)
        yield MetricSample("cachesvc_tenant_charged", (*of, "month"), each.this_month)
    for invariant, count in snapshots.violations().items():
        yield MetricSample("cachesvc_invariant_violations_total", (invariant,), count)


def _ledger_samples(ledger: LedgerStats) -> Iterator[MetricSample]:
    done = ledger.commands - ledger.refused
    yield MetricSample("cachesvc_ledger_commands_total", ("done",), done)
    yield MetricSample("cachesvc_ledger_commands_total", ("refused",), ledger.refused)
    yield MetricSample("cachesvc_ledger_settled_total", (), ledger.settled)
    yield MetricSample("cachesvc_ledger_reaped_total", ("lapsed",), ledger.swept)
    yield MetricSample("cachesvc_ledger_reaped_total", ("crashed",), ledger.recovered)
    yield MetricSample("cachesvc_ledger_commits_total", (), ledger.batches)
    yield MetricSample("cachesvc_ledger_failed_commits_total", (), ledger.failed_batches)
    yield MetricSample("cachesvc_ledger_commit_seconds_total", (), ledger.commit_ns / _SECOND)
    yield MetricSample("cachesvc_ledger_commit_seconds_max", (), ledger.commit_ns_max / _SECOND)
    yield MetricSample("cachesvc_ledger_queue", (), ledger.queued)
    yield MetricSample("cachesvc_ledger_clock_skew_seconds", (), ledger.clock_skew_s)


def _engine_samples(stats: "EngineStats") -> Iterator[MetricSample]:
    yield MetricSample("cachesvc_running_requests", (), stats.num_running)
    yield MetricSample("cachesvc_waiting_requests", (), stats.num_waiting)
    yield MetricSample("cachesvc_loading_requests", (), stats.num_loading)
    yield MetricSample("cachesvc_preemptions_total", (), stats.num_preemptions)
    yield MetricSample("cachesvc_steps_total", (), stats.num_steps)
    yield MetricSample("cachesvc_prefill_tokens_total", (), stats.prompt_tokens_computed)
    yield MetricSample("cachesvc_jumped_tokens_total", (), stats.jumped_tokens)
    yield from _cache_samples(stats.cache)


def _cache_samples(cache: "CacheStats") -> Iterator[MetricSample]:
    tiers = (cache.device, cache.host, *cache.below)
    for tier in tiers:
        yield from _tier_samples(tier)
    for tier in cache.checkpoints:
        labels = (str(tier.name),)
        yield MetricSample("cachesvc_checkpoints", labels, tier.num_blocks)
        yield MetricSample("cachesvc_checkpoint_bytes", labels, tier.used_bytes)
        yield MetricSample("cachesvc_checkpoint_capacity_bytes", labels, tier.capacity_bytes)
    none = {(tier.name, event): 0 for tier in tiers for event in CacheEvent}
    for (name, event), count in {**none, **cache.events}.items():
        yield MetricSample("cachesvc_cache_events_total", (name, event), count)
    for above, tier in pairwise((cache.host, *cache.below)):
        up, down = (tier.name, cache.host.name), (above.name, tier.name)
        yield MetricSample("cachesvc_transfer_bytes_total", up, tier.read_bytes)
        yield MetricSample("cachesvc_transfer_bytes_total", down, tier.written_bytes)
        yield from _shard_samples(tier.shards)
    for lane, moved in cache.transfers.items():
        yield MetricSample("cachesvc_transfer_seconds", lane, moved.seconds)
        if set(lane) <= set(MEMORY):  # the other tiers count what they store
            yield MetricSample("cachesvc_transfer_bytes_total", lane, moved.nbytes)
    yield MetricSample("cachesvc_load_bytes_per_second", (), cache.load_bytes_per_s)
    yield MetricSample("cachesvc_prefill_tokens_per_second", (), cache.prefill_tokens_per_s)
    yield MetricSample("cachesvc_loads_refused_total", (), cache.loads_refused)
    yield MetricSample("cachesvc_collisions_total", (), cache.collisions)
    yield MetricSample("cachesvc_pins", (), cache.num_pins)
    yield MetricSample("cachesvc_pinned_bytes", (), cache.pinned_blocks * cache.block_bytes)
    yield MetricSample("cachesvc_pinnable_bytes", (), cache.pinnable_blocks * cache.block_bytes)
    yield from _quota_samples(cache.groups)
    yield MetricSample("cachesvc_event_listeners", (), cache.num_listeners)
    yield MetricSample("cachesvc_events_missed_total", (), cache.events_missed)


def node_samples(node: "NodeCounters") -> Iterator[MetricSample]:
    """Samples of a stand-alone node; none while it does not answer."""
    if not node:
        return
    yield MetricSample("cachesvc_build_info", (cachesvc.__version__, ""), 1)
    yield MetricSample("cachesvc_event_listeners", (), node.num_listeners)
    for tier in (node.host(), *node.below()):
        yield from _tier_samples(tier)
        yield from _shard_samples(tier.shards)
    for (name, event), count in node.events().items():
        yield MetricSample("cachesvc_cache_events_total", (name, event), count)
    yield MetricSample("cachesvc_collisions_total", (), node.total("collisions"))
    yield MetricSample("cachesvc_pins", (), node.total("num_pins"))
    yield from _quota_samples(node.groups())


def _quota_samples(groups: "Sequence[GroupUse]") -> Iterator[MetricSample]:
    """Samples by group. Scopes with the default quota are many, so they count as one group."""
    used: Counter[tuple[str, str]] = Counter()
    share: Counter[tuple[str, str]] = Counter()
    for use in groups:
        name = use.group or "common"
        labels = (str(use.tier), "default" if name.startswith("scope:") else name)
        used[labels] += use.used_bytes
        share[labels] += use.share_bytes
    for labels in share:
        yield MetricSample("cachesvc_quota_used_bytes", labels, used[labels])
        yield MetricSample("cachesvc_quota_share_bytes", labels, share[labels])


def _tier_samples(tier: TierStats) -> Iterator[MetricSample]:
    labels = (str(tier.name),)
    yield MetricSample("cachesvc_cache_blocks", labels, tier.num_blocks)
    yield MetricSample("cachesvc_cache_bytes", labels, tier.used_bytes)
    yield MetricSample("cachesvc_cache_logical_bytes", labels, tier.logical_bytes)
    yield MetricSample("cachesvc_cache_capacity_bytes", labels, tier.capacity_bytes)
    if tier.setting_bytes:
        yield MetricSample("cachesvc_disk_setting_bytes", (), tier.setting_bytes)
    yield MetricSample("cachesvc_tier_served_blocks_total", labels, tier.hits)
    yield MetricSample("cachesvc_tier_missed_blocks_total", labels, tier.misses)
    faults = dict.fromkeys(FAULTS if tier.name not in MEMORY else (), 0)
    for reason, count in {**faults, **tier.faults}.items():
        yield MetricSample("cachesvc_tier_faults_total", (*labels, reason), count)
    for cause, count in {**dict.fromkeys(Cause, 0), **tier.lives.causes}.items():
        yield MetricSample("cachesvc_evictions_total", (*labels, cause), count)
    yield MetricSample("cachesvc_block_lifetime_seconds", labels, tier.lives.lifetime)
    yield MetricSample("cachesvc_block_idle_seconds", labels, tier.lives.idle)
    yield MetricSample("cachesvc_block_reuse_gap_seconds", labels, tier.lives.reuse_gap)


def shard_states(shards: Sequence[ShardStats]) -> Iterator[tuple[str, int]]:
    """The number of shards that are in service, read-only while checked, or unusable: being
    replaced, or on a disk that takes no writes."""
    num_ready = sum(shard.ready and not shard.failing for shard in shards)
    num_checking = sum(shard.checking for shard in shards)
    yield "ready", num_ready
    yield "checking", num_checking
    yield "replacing", len(shards) - num_ready - num_checking


def _shard_samples(shards: Sequence[ShardStats]) -> Iterator[MetricSample]:
    for state, count in shard_states(shards) if shards else ():
        yield MetricSample("cachesvc_disk_shards", (state,), count)
    for shard in shards:
        if shard.ready:
            yield MetricSample("cachesvc_disk_map_bytes", (shard.name,), shard.map_bytes)
            yield MetricSample("cachesvc_disk_map_used_bytes", (shard.name,), shard.used_bytes)
