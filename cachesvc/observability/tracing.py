"""OpenTelemetry traces of requests: one span each, with child spans for its phases.

    chat smollm2-135m ├─ queue ─┤├─ load ─┤├─ prefill ─┤├─ decode ─┤

Attributes use OpenTelemetry's conventions for generative AI (`gen_ai.*`); others begin with
`cachesvc.`. They contain no part of a prompt or an answer. When a request has ended, its spans are
made from the journal's record on the event loop, in about 0.3 ms. The exporter's thread sends them.
Needs the extra `otel`; nothing else imports opentelemetry.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

from api.journal.journal import RequestRecord, State
from billing.usage import TOKEN_CLASSES, Usage
from cachesvc.config.errors import ConfigError
from cachesvc.config.sections import TracingSection
from engine.request import Timeline

logger = logging.getLogger(__name__)

CHAT_ROUTES = ("/v1/chat/completions", "/chat/completions")
PROVIDER = "cachesvc"
EXPORT_S = 3.0  # to send a batch, including retries; shutdown waits no longer for the last one

Attributes = dict[str, Any]


def open_tracer(settings: TracingSection) -> "RequestTracer | None":
    """A tracer, if the settings name a collector. Raises ConfigError without the extra."""
    if not settings.endpoint:
        return None
    if not settings.endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"tracing.endpoint = {settings.endpoint!r}: write the collector's OTLP/HTTP address, "
            "such as http://127.0.0.1:4318"
        )
    try:
        return RequestTracer(settings)
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint needs the extra `otel` ({error.name} is not installed): "
            "pip install 'cachesvc[otel]', or leave it empty"
        ) from None


class RequestTracer:
    """Turns records into spans. `trace` on the event loop, `close` on any thread."""

    def __init__(self, settings: TracingSection) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._otel = trace
        self._extract = TraceContextTextMapPropagator().extract
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "cachesvc"}).merge(
                OTELResourceDetector().detect()  # OTEL_SERVICE_NAME
            ),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(
            endpoint=settings.endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_S
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("cachesvc")

    def trace(self, record: RequestRecord) -> None:
        offset_ns = time.time_ns() - time.monotonic_ns()  # requests are timed by the latter
        timeline = record.served.timeline if record.served is not None else Timeline()
        ended_ns = round((record.ended_s or time.time()) * 1e9)
        began_ns = round(record.arrived_s * 1e9)
        if timeline.arrival_ns:
            began_ns = timeline.arrival_ns + offset_ns
        span = self._tracer.start_span(
            f"{operation(record)} {record.model}",
            context=self._extract({"traceparent": record.trace_parent}),
            kind=self._otel.SpanKind.SERVER,
            attributes=attributes(record),
            start_time=began_ns,
        )
        if not span.is_recording():
            return
        if record.failure is not None:
            span.set_status(self._otel.StatusCode.ERROR, record.failure.message)
        below = self._otel.set_span_in_context(span)
        for name, start_ns, end_ns, fields in phases(record, timeline):
            child = self._tracer.start_span(
                name, context=below, attributes=fields, start_time=start_ns + offset_ns
            )
            child.end(end_ns + offset_ns)
        span.end(max(began_ns, ended_ns))

    def close(self) -> None:
        """Sends pending spans, within EXPORT_S."""
        self._provider.shutdown()


def operation(record: RequestRecord) -> str:
    return "chat" if record.route in CHAT_ROUTES else "text_completion"


def attributes(record: RequestRecord) -> Attributes:
    fields: Attributes = {
        "gen_ai.operation.name": operation(record),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.request.stream": record.stream,
        "gen_ai.request.choice.count": record.num_choices,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "http.route": record.route,
        "cachesvc.tenant": record.tenant,
    }
    if record.session:
        fields["gen_ai.conversation.id"] = record.session
    if record.served is not None:
        fields |= _usage(record.served.usage)
        fields["cachesvc.outcome"] = str(record.served.outcome)
        fields["gen_ai.response.finish_reasons"] = [
            str(finish) for finish in record.served.finishes if finish is not None
        ]
        for reason, tokens in record.served.miss_reasons.items():
            fields[f"cachesvc.miss.{reason}"] = tokens
    if record.bill is not None and record.bill.cost is not None:
        fields["cachesvc.cost"] = f"{record.bill.cost} {record.bill.currency}"
    if record.failure is not None:
        fields["error.type"] = record.failure.code or record.failure.type
    if record.state is State.REFUSED:
        fields["cachesvc.outcome"] = "refused"
    return fields


def phases(
    record: RequestRecord, timeline: Timeline
) -> list[tuple[str, int, int, Mapping[str, Any]]]:
    """(name, start, end, attributes) of each phase reached, in ns of the monotonic clock."""
    usage = record.served.usage if record.served is not None else None
    load = _hits(usage) if usage is not None else {}
    decode = {"gen_ai.usage.output_tokens": usage.output} if usage is not None else {}
    prefill = {"cachesvc.computed_tokens": usage.miss} if usage is not None else {}
    when = timeline
    spans: list[tuple[str, int, int, Mapping[str, Any]]] = [
        ("queue", when.arrival_ns, when.admitted_ns, {}),
        ("load", when.admitted_ns, when.loaded_ns, load),
        ("prefill", when.loaded_ns, when.first_token_ns, prefill),
        ("decode", when.first_token_ns, when.last_token_ns, decode),
    ]
    return [span for span in spans if span[1] and span[2] >= span[1]]


def _usage(usage: Usage) -> Attributes:
    return {
        "gen_ai.usage.output_tokens": usage.output,
        "gen_ai.usage.cache_read.input_tokens": usage.hit,
        **_hits(usage),
        "cachesvc.computed_tokens": usage.miss,
    }


def _hits(usage: Usage) -> Attributes:
    tiers = [each for each in TOKEN_CLASSES if each.tier]
    return {f"cachesvc.hit_tokens.{each.tier}": getattr(usage, each.name) for each in tiers}
