"""Models, tokens, health, metrics, request ids, and the one log line of a request."""

from dataclasses import replace

import httpx
import structlog.testing
from fastapi import APIRouter

from api.app import create_app
from api.collaborators import Readiness
from tests.api.conftest import running
from tests.support.wire import FakeHouse, Script, byte_model, fake_house

CHAT = "/v1/chat/completions"
SECRET = "never to be logged"
HELLO = {"model": "bytes", "messages": [{"role": "user", "content": SECRET}]}


async def test_models_are_listed_and_shown(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    shown = (await client.get("/v1/models/bytes")).json()
    assert ("list", [shown]) == (listed["object"], listed["data"])
    assert ("bytes", "model", 4096) == (shown["id"], shown["object"], shown["max_model_len"])
    assert 404 == (await client.get("/v1/models/else")).status_code


async def test_names_with_slashes_and_adapters_are_models() -> None:
    adapter = replace(byte_model("org/adapter"), adapter="adapter", parent="bytes")
    house = fake_house(models=[byte_model(), adapter])
    async with running(house) as (_, client):
        shown = (await client.get("/v1/models/org/adapter")).json()
        assert ("org/adapter", "bytes") == (shown["id"], shown["parent"])
        await client.post(CHAT, json=HELLO | {"model": "org/adapter"})
        assert ["adapter"] == [request.adapter for request in house.engine.requests]


async def test_paths_without_the_prefix_are_served(client: httpx.AsyncClient) -> None:
    assert 200 == (await client.post("/chat/completions", json=HELLO)).status_code
    assert 200 == (await client.get("/models")).status_code


async def test_tokens_there_and_back(client: httpx.AsyncClient) -> None:
    there = (await client.post("/tokenize", json={"prompt": "hé"})).json()
    assert ([104, 195, 169], 3, 4096) == (there["tokens"], there["count"], there["max_model_len"])
    back = (await client.post("/detokenize", json={"tokens": there["tokens"]})).json()
    assert "hé" == back["prompt"]
    chat = await client.post("/tokenize", json={"messages": HELLO["messages"]})
    assert len(f"user: {SECRET}\nassistant: ") == chat.json()["count"]


async def test_long_texts_leave_the_event_loop(client: httpx.AsyncClient, house: FakeHouse) -> None:
    text = "x" * 3000
    assert 3000 == (await client.post("/tokenize", json={"prompt": text})).json()["count"]
    assert house.wire.inference.encoders._threads._threads


async def test_alive_and_ready_are_two_questions(house: FakeHouse) -> None:
    loading = replace(house.wire, readiness=lambda: Readiness(False, "the model loads", {"n": 1}))
    transport = httpx.ASGITransport(create_app(loading))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert 200 == (await client.get("/health")).status_code
        ready = await client.get("/health/ready")
        assert (503, {"status": "not ready", "reason": "the model loads", "n": 1}) == (
            ready.status_code,
            ready.json(),
        )
        heads = [await client.head(path) for path in ("/health", "/health/ready")]
        assert [200, 503] == [head.status_code for head in heads]
        dead = Readiness(False, "the engine has failed", alive=False)
        app = create_app(replace(house.wire, readiness=lambda: dead))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        failed = await client.get("/health")
        assert (503, {"status": "failed", "reason": "the engine has failed"}) == (
            failed.status_code,
            failed.json(),
        )
        metrics = await client.get("/metrics")
        assert ("# none\n", "text/plain; version=0.0.4") == (
            metrics.text,
            metrics.headers["content-type"],
        )
    house.close()


async def test_further_routers_are_mounted(house: FakeHouse) -> None:
    router = APIRouter()
    router.add_api_route("/admin/hello", lambda: {"hello": "admin"})
    transport = httpx.ASGITransport(create_app(house.wire, routers=[router]))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert {"hello": "admin"} == (await client.get("/admin/hello")).json()
    house.close()


async def test_request_ids_are_echoed_or_made(client: httpx.AsyncClient) -> None:
    own = await client.get("/v1/models", headers={"X-Request-Id": "mine-1"})
    assert "mine-1" == own.headers["x-request-id"]
    for unfit in ("a b", "x" * 200, ""):
        made = await client.get("/v1/models", headers={"X-Request-Id": unfit})
        assert 32 == len(made.headers["x-request-id"])
    streamed = await client.post(
        CHAT, json=HELLO | {"stream": True}, headers={"X-Request-Id": "mine-2"}
    )
    assert ["mine-2"] == streamed.headers.get_list("x-request-id")


async def test_a_request_leaves_one_line_with_its_story(
    client: httpx.AsyncClient, house: FakeHouse
) -> None:
    house.engine.script = Script(answer="an answer", hits={"hit_host": 7})
    with structlog.testing.capture_logs() as lines:
        headers = {"authorization": "Bearer sk-secret", "X-Request-Id": "r1"}
        await client.post(CHAT, json=HELLO, headers=headers)
        await client.get("/health")
        await client.get("/metrics")
    (line,) = lines
    prompt = len(f"user: {SECRET}\nassistant: ")
    assert {
        "event": "request",
        "path": CHAT,
        "status": 200,
        "tenant": "default",
        "model": "bytes",
        "client_request_id": "r1",
        "prompt_tokens": prompt,
        "hit_host": 7,
        "miss": prompt - 7,
        "completion_tokens": 10,
        "outcome": "finished",
        "delivered": True,
        "settled": True,
        "cost": "0.000012",
        "miss_reasons": {"absent": prompt - 7},
    }.items() <= line.items()
    assert {"queue_ms", "load_ms", "ttft_ms", "first_byte_ms", "duration_ms"} <= set(line)
    assert not {"sk-secret", SECRET, "an answer"} & set(map(str, line.values()))
    assert all(SECRET not in str(value) for value in line.values())


async def test_refusals_are_logged_too(client: httpx.AsyncClient) -> None:
    with structlog.testing.capture_logs() as lines:
        await client.post(CHAT, json=HELLO | {"temperature": 9})
    assert {"status": 400, "error": "InvalidRequest", "param": "temperature"}.items() <= (
        lines[0].items()
    )
