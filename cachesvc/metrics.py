"""What `/metrics` answers with; the only module that knows prometheus_client.

Two sources feed it. Snapshots are read when someone scrapes: the engine's and the tiers' stats, the
ledger's. Observers are called while it happens: `observe_outputs` on the engine thread, once per
step; `observe_bill` and `observe_http` on the event loop. Base units, closed label sets; ratios
are left to queries. The names are declared in `cachesvc.metric_names`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client import Counter as PromCounter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import cachesvc
from billing.ledger import LedgerStats
from cachesvc.metric_names import ROUTES, SPECS, VLLM_ALIASES
from engine.engine import EngineStats
from engine.request import StepOutput, TokenCounts
from tiers.cache import CacheStats
from tiers.tier import TierStats

_SECOND = 1e9  # nanoseconds


class Sample(NamedTuple):
    """One value of a metric fed by a snapshot."""

    name: str
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class MoneyStats:
    """The ledger's snapshot: open holds, the oldest one's age, what does not add up, its thread."""

    num_holds: int = 0
    oldest_hold_s: float = 0.0
    drift_units: int = 0
    ledger: LedgerStats = field(default_factory=LedgerStats)


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Where a scrape finds the state of now; each is called on the thread that scrapes."""

    engine: Callable[[], EngineStats]
    money: Callable[[], MoneyStats] = MoneyStats
    violations: Callable[[], Mapping[str, int]] = field(default=dict)


class Metrics:
    """The observers, and the text that `/metrics` answers with."""

    def __init__(
        self, snapshots: Snapshots, *, model: str = "", vllm_aliases: bool = False
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)
        self._counters = {
            name: PromCounter(name, spec.help, spec.labels, registry=self.registry)
            for name, spec in SPECS.items()
            if spec.kind == "counter" and name in _OBSERVED
        }
        self._histograms = {
            name: Histogram(
                name, spec.help, spec.labels, buckets=spec.buckets, registry=self.registry
            )
            for name, spec in SPECS.items()
            if spec.kind == "histogram"
        }
        current = _SnapshotCollector(snapshots)
        self.registry.register(current)
        if vllm_aliases:
            sources = [*self._counters.values(), *self._histograms.values(), current]
            self.registry.register(_AliasCollector(sources, model))
        self._last_token_ns: dict[tuple[str, int], int] = {}

    def render(self) -> tuple[bytes, str]:
        """The body of `/metrics` and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def counters(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """What was counted so far, by metric and label values; cheap enough for every second."""
        return {
            (name, tuple(sample.labels.values())): sample.value
            for name, counter in self._counters.items()
            for family in counter.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    def observe_outputs(self, outputs: Sequence[StepOutput]) -> None:
        """Engine thread, once per step."""
        num_tokens = 0
        for output in outputs:
            if output.miss_reasons:
                self._observe_admitted(output)
            if output.tokens:
                num_tokens += len(output.tokens)
                self._observe_gap(output)
            if output.finish:
                self._last_token_ns.pop((output.request_id, output.index), None)
            if output.last:
                self._observe_last(output)
        if num_tokens:
            self._counters["cachesvc_generation_tokens_total"].inc(num_tokens)

    def observe_http(self, route: str, code: int, seconds: float) -> None:
        """Event loop, when a response has ended."""
        known = route if route in ROUTES else "/admin" if route.startswith("/admin") else "other"
        self._counters["cachesvc_http_requests_total"].labels(known, str(code)).inc()
        self._histograms["cachesvc_http_request_seconds"].labels(known).observe(seconds)

    def observe_bill(
        self, currency: str, units_by_class: Mapping[str, int], saved_units: int
    ) -> None:
        """Event loop, when a request is settled; amounts in 1e-12 of the currency unit."""
        for token_class, units in units_by_class.items():
            if units:
                counter = self._counters["cachesvc_billed_units_total"]
                counter.labels(token_class, currency).inc(units)
        if saved_units > 0:
            self._counters["cachesvc_saved_units_total"].labels(currency).inc(saved_units)

    def _observe_admitted(self, output: StepOutput) -> None:
        counts, when = output.counts, output.timeline
        sources = self._counters["cachesvc_prompt_tokens_total"]
        for source, tokens in _by_source(counts):
            if tokens:
                sources.labels(source).inc(tokens)
        for reason, tokens in output.miss_reasons.items():
            self._counters["cachesvc_miss_tokens_total"].labels(reason).inc(tokens)
        if when.first_token_ns:
            ttft = self._histograms["cachesvc_time_to_first_token_seconds"]
            ttft.labels(hit_class(counts)).observe(_seconds(when.arrival_ns, when.first_token_ns))
            self._observe_span("cachesvc_queue_seconds", when.arrival_ns, when.admitted_ns)
            self._observe_span("cachesvc_load_seconds", when.admitted_ns, when.loaded_ns)
            self._observe_span("cachesvc_prefill_seconds", when.loaded_ns, when.first_token_ns)

    def _observe_gap(self, output: StepOutput) -> None:
        key, now_ns = (output.request_id, output.index), output.timeline.last_token_ns
        before_ns = self._last_token_ns.get(key)
        self._last_token_ns[key] = now_ns
        if before_ns is not None:
            self._observe_span("cachesvc_inter_token_seconds", before_ns, now_ns)

    def _observe_last(self, output: StepOutput) -> None:
        self._counters["cachesvc_requests_total"].labels(output.finish or "error").inc()
        self._observe_span(
            "cachesvc_request_seconds", output.timeline.arrival_ns, output.timeline.last_token_ns
        )

    def _observe_span(self, name: str, start_ns: int, end_ns: int) -> None:
        if start_ns and end_ns >= start_ns:
            self._histograms[name].observe(_seconds(start_ns, end_ns))


def hit_class(counts: TokenCounts) -> str:
    """The slowest tier that served a part of the prompt, or `cold`."""
    served = [source for source, tokens in _by_source(counts) if tokens and source != "computed"]
    return served[-1] if served else "cold"


_OBSERVED = frozenset(
    {
        "cachesvc_http_requests_total",
        "cachesvc_requests_total",
        "cachesvc_prompt_tokens_total",
        "cachesvc_generation_tokens_total",
        "cachesvc_miss_tokens_total",
        "cachesvc_billed_units_total",
        "cachesvc_saved_units_total",
    }
)


def _by_source(counts: TokenCounts) -> tuple[tuple[str, int], ...]:
    return (
        ("device", counts.hit_device),
        ("host", counts.hit_host),
        ("disk", counts.hit_disk),
        ("remote", counts.hit_remote),
        ("computed", counts.miss),
    )


def _seconds(start_ns: int, end_ns: int) -> float:
    return max(0, end_ns - start_ns) / _SECOND


class _SnapshotCollector(Collector):
    """Turns snapshots into samples at each scrape."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sample in _samples(self._snapshots):
            spec = SPECS[sample.name]
            family = families.get(sample.name)
            if family is None:
                kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
                family = kind(sample.name, spec.help, labels=spec.labels)
                families[sample.name] = family
            family.add_metric(sample.labels, sample.value)
        yield from families.values()


def _samples(snapshots: Snapshots) -> Iterator[Sample]:
    yield Sample("cachesvc_build_info", (cachesvc.__version__,), 1)
    yield from _engine_samples(snapshots.engine())
    money = snapshots.money()
    yield Sample("cachesvc_holds", (), money.num_holds)
    yield Sample("cachesvc_hold_age_seconds", (), money.oldest_hold_s)
    yield Sample("cachesvc_ledger_drift_units", (), money.drift_units)
    yield from _ledger_samples(money.ledger)
    for invariant, count in snapshots.violations().items():
        yield Sample("cachesvc_invariant_violations_total", (invariant,), count)


def _ledger_samples(ledger: LedgerStats) -> Iterator[Sample]:
    done = ledger.commands - ledger.refused
    yield Sample("cachesvc_ledger_commands_total", ("done",), done)
    yield Sample("cachesvc_ledger_commands_total", ("refused",), ledger.refused)
    yield Sample("cachesvc_ledger_settled_total", (), ledger.settled)
    yield Sample("cachesvc_ledger_reaped_total", ("lapsed",), ledger.swept)
    yield Sample("cachesvc_ledger_reaped_total", ("crashed",), ledger.recovered)
    yield Sample("cachesvc_ledger_commits_total", (), ledger.batches)
    yield Sample("cachesvc_ledger_failed_commits_total", (), ledger.failed_batches)
    yield Sample("cachesvc_ledger_commit_seconds_total", (), ledger.commit_ns / _SECOND)
    yield Sample("cachesvc_ledger_commit_seconds_max", (), ledger.commit_ns_max / _SECOND)
    yield Sample("cachesvc_ledger_queue", (), ledger.queued)


def _engine_samples(stats: EngineStats) -> Iterator[Sample]:
    yield Sample("cachesvc_running_requests", (), stats.num_running)
    yield Sample("cachesvc_waiting_requests", (), stats.num_waiting)
    yield Sample("cachesvc_loading_requests", (), stats.num_loading)
    yield Sample("cachesvc_preemptions_total", (), stats.num_preemptions)
    yield Sample("cachesvc_steps_total", (), stats.num_steps)
    yield Sample("cachesvc_prefill_tokens_total", (), stats.prompt_tokens_computed)
    yield from _cache_samples(stats.cache)


def _cache_samples(cache: CacheStats) -> Iterator[Sample]:
    for tier in (cache.device, cache.host, cache.disk):
        if tier is not None:
            yield from _tier_samples(tier)
    for (name, event), count in cache.events.items():
        yield Sample("cachesvc_cache_events_total", (name, event), count)
    if cache.disk is not None:
        yield Sample("cachesvc_transfer_bytes_total", ("disk", "host"), cache.disk.read_bytes)
        yield Sample("cachesvc_transfer_bytes_total", ("host", "disk"), cache.disk.written_bytes)
    yield Sample("cachesvc_transfer_bytes_total", ("host", "device"), cache.host.read_bytes)
    yield Sample("cachesvc_transfer_bytes_total", ("device", "host"), cache.host.written_bytes)
    yield Sample("cachesvc_load_bytes_per_second", (), cache.load_bytes_per_s)
    yield Sample("cachesvc_prefill_tokens_per_second", (), cache.prefill_tokens_per_s)
    yield Sample("cachesvc_loads_refused_total", (), cache.loads_refused)
    yield Sample("cachesvc_collisions_total", (), cache.collisions)


def _tier_samples(tier: TierStats) -> Iterator[Sample]:
    labels = (str(tier.name),)
    yield Sample("cachesvc_cache_blocks", labels, tier.num_blocks)
    yield Sample("cachesvc_cache_bytes", labels, tier.used_bytes)
    yield Sample("cachesvc_cache_logical_bytes", labels, tier.logical_bytes)
    yield Sample("cachesvc_cache_capacity_bytes", labels, tier.capacity_bytes)
    yield Sample("cachesvc_tier_served_blocks_total", labels, tier.hits)
    yield Sample("cachesvc_tier_missed_blocks_total", labels, tier.misses)
    for reason, count in tier.faults.items():
        yield Sample("cachesvc_tier_faults_total", (*labels, reason), count)


class _AliasCollector(Collector):
    """The same values once more under vLLM's names, with its `model_name` label."""

    def __init__(self, sources: Sequence[Collector], model: str) -> None:
        self._sources = sources
        self._model = model

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        names = {name.removesuffix("_total"): alias for alias, name in VLLM_ALIASES.items()}
        for family in (family for source in self._sources for family in source.collect()):
            if family.name in names:
                yield self._renamed(family, names[family.name])

    def _renamed(self, family: Metric, alias: str) -> Metric:
        """`family` under another name, summed over its own labels but a bucket's bound."""
        sums: dict[tuple[str, str | None], float] = defaultdict(float)
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                suffix = sample.name.removeprefix(family.name)
                sums[suffix, sample.labels.get("le")] += sample.value
        renamed = Metric(alias, family.documentation, family.type)
        for (suffix, bound), value in sums.items():
            bucket = {} if bound is None else {"le": bound}
            renamed.add_sample(alias + suffix, {"model_name": self._model} | bucket, value)
        return renamed
