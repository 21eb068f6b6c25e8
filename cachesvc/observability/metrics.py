"""The content of `/metrics`; the only module that imports prometheus_client.

It has two sources. Snapshots of engine, tiers and ledger are read at each scrape. Observers are
called at each event: `observe_outputs` on the engine thread, once per step; `observe_bill` and
`observe_http` on the event loop. Units are base units, label sets are closed, and ratios are left
to queries. Their rows are in `cachesvc.observability.table`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
    start_http_server,
)
from prometheus_client import Counter as PromCounter
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from cachesvc.observability.latency import Latencies
from cachesvc.observability.names import ROUTES
from cachesvc.observability.snapshot import Sources
from cachesvc.observability.table import METRICS, OBSERVED, MetricSample, samples
from engine.request import StepOutput, TokenCounts
from tiers.histogram import Spread
from tiers.tier import TierName

_SECOND = 1e9  # nanoseconds


class Metrics:
    """The observers and the text of `/metrics`.

    Each request's durations also go to `latencies`.
    """

    def __init__(self, sources: Sources, latencies: Latencies) -> None:
        self._latencies = latencies
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)
        self._counters: dict[str, PromCounter] = {}
        self._histograms: dict[str, Histogram] = {}
        for row in OBSERVED:
            described = (row.name, row.meaning, row.labels)
            metric: PromCounter | Histogram
            if row.buckets:
                metric = Histogram(*described, buckets=row.buckets, registry=self.registry)
                self._histograms[row.name] = metric
            else:
                metric = self._counters[row.name] = PromCounter(*described, registry=self.registry)
            for value in row.at_zero:
                metric.labels(value)
        self.registry.register(_SnapshotCollector(partial(samples, sources)))
        self._last_token_ns: dict[tuple[str, int], int] = {}

    def render(self) -> tuple[bytes, str]:
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def counters(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Current counts by metric and label values; cheap enough to call each second."""
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
            if output.miss_reasons or output.lookup is not None:  # its first: it tells the prompt
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
        """Event loop, when a request is settled. Amounts are 1e-12 of the currency unit."""
        for token_class, units in units_by_class.items():
            counter = self._counters["cachesvc_billed_units_total"]
            counter.labels(token_class, currency).inc(units)
        self._counters["cachesvc_saved_units_total"].labels(currency).inc(max(0, saved_units))

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
            seconds = _seconds(when.arrival_ns, when.first_token_ns)
            ttft.labels(hit_class(counts)).observe(seconds)
            self._latencies.observe("ttft", seconds)
            self._observe_span("queue", when.arrival_ns, when.admitted_ns)
            self._observe_span("load", when.admitted_ns, when.loaded_ns)
            self._observe_span("prefill", when.loaded_ns, when.first_token_ns)

    def _observe_gap(self, output: StepOutput) -> None:
        key, now_ns = (output.request_id, output.index), output.timeline.last_token_ns
        before_ns = self._last_token_ns.get(key)
        self._last_token_ns[key] = now_ns
        if before_ns is not None:
            self._observe_span("inter_token", before_ns, now_ns)

    def _observe_last(self, output: StepOutput) -> None:
        self._counters["cachesvc_requests_total"].labels(output.finish or "error").inc()
        when = output.timeline
        self._observe_span("request", when.arrival_ns, when.last_token_ns)

    def _observe_span(self, name: str, start_ns: int, end_ns: int) -> None:
        if start_ns and end_ns >= start_ns:
            seconds = _seconds(start_ns, end_ns)
            self._histograms[f"cachesvc_{name}_seconds"].observe(seconds)
            self._latencies.observe(name, seconds)


def serve_samples(host: str, port: int, read: Callable[[], Iterable[MetricSample]]) -> int:
    """Serves the samples of `read` to scrapes at an address. Returns the port. Raises OSError.

    Runs on its own threads until the process ends.
    """
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(_SnapshotCollector(read))
    server, _ = start_http_server(port, host, registry)
    return int(server.server_port)


def hit_class(counts: TokenCounts) -> str:
    """The slowest tier that served a part of the prompt, or `cold`."""
    served = [source for source, tokens in _by_source(counts) if tokens and source != "computed"]
    return served[-1] if served else "cold"


SOURCES = (*TierName, "computed")


def _by_source(counts: TokenCounts) -> tuple[tuple[str, int], ...]:
    hits = (getattr(counts, f"hit_{tier}") for tier in TierName)
    return tuple(zip(SOURCES, (*hits, counts.miss), strict=True))


def _seconds(start_ns: int, end_ns: int) -> float:
    return max(0, end_ns - start_ns) / _SECOND


_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_FAMILIES: Mapping[str, type[_Family]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _buckets(spread: Spread) -> list[tuple[str, float]]:
    bounds = [*(repr(float(bound)) for bound in spread.bounds), "+Inf"]
    return list(zip(bounds, accumulate(spread.counts), strict=True))


class _SnapshotCollector(Collector):
    def __init__(self, read: Callable[[], Iterable[MetricSample]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, _Family] = {}
        for sample in self._read():
            family = families.get(sample.name)
            if family is None:
                row = METRICS[sample.name]
                family = _FAMILIES[row.kind](row.name, row.meaning, labels=row.labels)
                families[sample.name] = family
            if isinstance(family, HistogramMetricFamily):
                assert isinstance(sample.value, Spread), sample
                family.add_metric(sample.labels, _buckets(sample.value), sample.value.total)
            else:
                assert not isinstance(sample.value, Spread), sample
                family.add_metric(sample.labels, sample.value)
        yield from families.values()
