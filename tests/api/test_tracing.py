"""Traces of requests as a collector receives them: over OTLP/HTTP, decoded from protobuf."""

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from api.journal.journal import Journal
from cachesvc.config.errors import ConfigError
from cachesvc.config.sections import TracingSection
from cachesvc.observability.tracing import open_tracer
from engine.errors import QueueFull
from tests.api.conftest import running
from tests.support.stand_in import Handler, StandIn, served
from tests.support.wire import Script, fake_house
from tiers.errors import MissReason

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(StandIn):
    """A receiver of OTLP/HTTP."""

    def __init__(self):
        super().__init__(_Receiver)
        self.spans = {}
        self.resources = []

    def take(self, request):
        for resource in request.resource_spans:
            self.resources.append(told(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans |= {span.name: span for span in scope.spans}


class _Receiver(Handler):
    server: Collector

    def do_POST(self):
        assert "/v1/traces" == self.path
        assert "application/x-protobuf" == self.headers["Content-Type"]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.take(ExportTraceServiceRequest.FromString(body))
        self.say(200, ExportTraceServiceResponse().SerializeToString())


def told(attributes):
    found = {}
    for pair in attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        if kind == "array_value":
            value = [each.string_value for each in value.values]
        found[pair.key] = value
    return found


@pytest.fixture
def collector():
    with served(Collector()) as collector:
        yield collector


@pytest.fixture
def tracer(collector, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
    tracer = open_tracer(TracingSection(endpoint=collector.url))
    assert tracer is not None
    yield tracer
    tracer.close()


@pytest.fixture
async def house(tracer):
    return fake_house(journal=Journal(on_end=tracer.trace))


@pytest.fixture
async def client(house):
    async with running(house) as (_, client):
        yield client


async def chat(client, **headers):
    body = {"model": "bytes", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    body["model"] = (await client.get("/v1/models")).json()["data"][0]["id"]
    return await client.post("/v1/chat/completions", json=body, headers=headers)


async def test_a_request_is_a_span_with_its_phases_below(house, client, tracer, collector):
    house.engine.script = Script(
        answer="abc", hits={"hit_host": 4, "hit_device": 2}, reasons={MissReason.ABSENT: 10}
    )
    answer = await chat(client, traceparent=f"00-{TRACE}-{PARENT}-01", **{"x-session-id": "s1"})
    assert 200 == answer.status_code
    tracer.close()
    usage = answer.json()["usage"]
    (root,) = [span for name, span in collector.spans.items() if name.startswith("chat ")]
    assert (TRACE, PARENT) == (root.trace_id.hex(), root.parent_span_id.hex())
    assert Span.SPAN_KIND_SERVER == root.kind
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "cachesvc",
        "gen_ai.request.model": answer.json()["model"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 6,
        "gen_ai.conversation.id": "s1",
        "gen_ai.response.finish_reasons": ["length"],
        "cachesvc.hit_tokens.host": 4,
        "cachesvc.computed_tokens": usage["prompt_tokens"] - 6,
        "cachesvc.outcome": "finished",
        "cachesvc.tenant": "default",
    }
    attributes = told(root.attributes)
    assert expected == {name: attributes.get(name) for name in expected}
    assert "shop" == collector.resources[0]["service.name"]
    children = [collector.spans[name] for name in ("queue", "load", "prefill", "decode")]
    assert {root.span_id} == {child.parent_span_id for child in children}
    times = [each for child in children for each in (child.start_time_unix_nano,)]
    assert sorted(times) == times
    assert root.start_time_unix_nano <= times[0]
    assert children[-1].end_time_unix_nano <= root.end_time_unix_nano
    assert not [each for each in attributes.values() if "hello" in str(each)]


async def test_a_refused_request_is_a_span_with_the_error(house, client, tracer, collector):
    house.engine.script = Script(refuse=QueueFull("7 requests are in flight"))
    assert 503 == (await chat(client)).status_code
    tracer.close()
    (root,) = collector.spans.values()
    assert Status.STATUS_CODE_ERROR == root.status.code
    attributes = told(root.attributes)
    assert "overloaded" == attributes["error.type"]
    assert "refused" == attributes["cachesvc.outcome"]


async def test_a_client_that_does_not_sample_is_not_traced(client, tracer, collector):
    assert 200 == (await chat(client, traceparent=f"00-{TRACE}-{PARENT}-00")).status_code
    assert 200 == (await chat(client, traceparent="nonsense")).status_code
    tracer.close()
    roots = [span for name, span in collector.spans.items() if name.startswith("chat ")]
    assert [b""] == [span.parent_span_id for span in roots]


def test_without_an_endpoint_nothing_is_made_and_a_wrong_one_is_said():
    assert open_tracer(TracingSection()) is None
    with pytest.raises(ConfigError, match="write the collector"):
        open_tracer(TracingSection(endpoint="collector:4317"))


def test_a_missing_extra_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'cachesvc\[otel\]'"):
        open_tracer(TracingSection(endpoint="http://127.0.0.1:1"))
