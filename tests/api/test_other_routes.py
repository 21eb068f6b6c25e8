"""Models, tokens, health, metrics, request ids, the log line; routes that are direct, refused or
documented."""

import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import structlog.testing

from api.app import create_app
from api.collaborators import Readiness
from api.errors import ROUTE_CODES, TABLE, UNEXPECTED
from api.routes.unserved import UNSERVED
from api.shapes.schemas import ChatBody, CompletionBody, Extension
from tests.api.conftest import running
from tests.support.wire import Script, byte_model, fake_house

ROOT = Path(__file__).parents[2]
README, PAGE = (ROOT / "README.md").read_text("utf-8"), (ROOT / "docs" / "api.md").read_text()
NOT_TOLD = {"cachesvc", "stream_options"}
ANSWERS = {  # the framework's search for a route and for parameters is left out
    *("/v1/chat/completions", "/chat/completions", "/v1/completions", "/completions"),
    *("/v1/messages", "/v1/responses", "/responses"),
}
CHAT = "/v1/chat/completions"
SECRET = "never to be logged"
HELLO = {"model": "bytes", "messages": [{"role": "user", "content": SECRET}]}


async def test_models_are_listed_and_shown(client):
    listed = (await client.get("/v1/models")).json()
    shown = (await client.get("/v1/models/bytes")).json()
    assert ("list", [shown]) == (listed["object"], listed["data"])
    assert ("bytes", "model", 4096) == (shown["id"], shown["object"], shown["max_model_len"])
    assert 404 == (await client.get("/v1/models/else")).status_code


async def test_names_with_slashes_and_adapters_are_models():
    adapter = replace(byte_model("org/adapter"), adapter="adapter", parent="bytes")
    house = fake_house(models=[byte_model(), adapter])
    async with running(house) as (_, client):
        shown = (await client.get("/v1/models/org/adapter")).json()
        assert ("org/adapter", "bytes") == (shown["id"], shown["parent"])
        await client.post(CHAT, json=HELLO | {"model": "org/adapter"})
        assert ["adapter"] == [request.adapter for request in house.engine.requests]


async def test_paths_without_the_prefix_are_served(client):
    assert 200 == (await client.post("/chat/completions", json=HELLO)).status_code
    assert 200 == (await client.get("/models")).status_code


async def test_tokens_there_and_back(client):
    there = (await client.post("/tokenize", json={"prompt": "hé"})).json()
    assert ([104, 195, 169], 3, 4096) == (there["tokens"], there["count"], there["max_model_len"])
    back = (await client.post("/detokenize", json={"tokens": there["tokens"]})).json()
    assert "hé" == back["prompt"]
    chat = await client.post("/tokenize", json={"messages": HELLO["messages"]})
    assert len(f"user: {SECRET}\nassistant: ") == chat.json()["count"]


async def test_long_texts_leave_the_event_loop(client, house):
    text = "x" * 3000
    assert 3000 == (await client.post("/tokenize", json={"prompt": text})).json()["count"]
    assert house.wire.inference.encoders._threads._threads


def asking(app):
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_alive_and_ready_are_two_questions(house):
    loading = replace(house.wire, readiness=lambda: Readiness(False, "the model loads", {"n": 1}))
    async with asking(create_app(loading)) as client:
        assert 200 == (await client.get("/health")).status_code
        ready = await client.get("/health/ready")
        told = {"status": "not ready", "reason": "the model loads", "n": 1}
        assert (503, told) == (ready.status_code, ready.json())
        heads = [await client.head(path) for path in ("/health", "/health/ready")]
        assert [200, 503] == [head.status_code for head in heads]
    dead = Readiness(False, "the engine has failed", alive=False)
    async with asking(create_app(replace(house.wire, readiness=lambda: dead))) as client:
        failed = await client.get("/health")
        told = {"status": "failed", "reason": "the engine has failed"}
        assert (503, told) == (failed.status_code, failed.json())
        metrics, kind = await client.get("/metrics"), "text/plain; version=0.0.4"
        assert ("# none\n", kind) == (metrics.text, metrics.headers["content-type"])
    house.close()


async def test_request_ids_are_echoed_or_made(client):
    own = await client.get("/v1/models", headers={"X-Request-Id": "mine-1"})
    assert "mine-1" == own.headers["x-request-id"]
    for unfit in ("a b", "x" * 200, ""):
        made = await client.get("/v1/models", headers={"X-Request-Id": unfit})
        assert 32 == len(made.headers["x-request-id"])
    streamed = await client.post(
        CHAT, json=HELLO | {"stream": True}, headers={"X-Request-Id": "mine-2"}
    )
    assert ["mine-2"] == streamed.headers.get_list("x-request-id")


async def test_a_request_leaves_one_line_with_its_story(client, house):
    house.engine.script = Script(answer="an answer", hits={"hit_host": 7})
    with structlog.testing.capture_logs() as lines:
        headers = {"authorization": "Bearer sk-secret", "X-Request-Id": "r1"}
        await client.post(CHAT, json=HELLO, headers=headers)
        await client.get("/health")
        await client.get("/metrics")
    (line,) = lines
    prompt = len(f"user: {SECRET}\nassistant: ")
    story = {"event": "request", "path": CHAT, "status": 200, "tenant": "default"}
    story |= {"model": "bytes", "client_request_id": "r1", "outcome": "finished"}
    story |= {"prompt_tokens": prompt, "hit_host": 7, "miss": prompt - 7, "completion_tokens": 10}
    story |= {"delivered": True, "settled": True, "cost": "0.000012"}
    story |= {"miss_reasons": {"absent": prompt - 7}}
    assert story.items() <= line.items()
    assert {"queue_ms", "load_ms", "ttft_ms", "first_byte_ms", "duration_ms"} <= set(line)
    assert not {"sk-secret", SECRET, "an answer"} & set(map(str, line.values()))
    assert all(SECRET not in str(value) for value in line.values())


async def test_refusals_are_logged_too(client):
    with structlog.testing.capture_logs() as lines:
        await client.post(CHAT, json=HELLO | {"temperature": 9})
    assert {"status": 400, "error": "InvalidRequest", "param": "temperature"}.items() <= (
        lines[0].items()
    )


async def test_answers_need_no_search_of_the_framework(app, client):
    for path in ANSWERS:
        assert 405 == (await client.get(path)).status_code
    app.router.routes.clear()
    refused = {path: (await client.post(path, json={})).status_code for path in ANSWERS}
    assert dict.fromkeys(ANSWERS, 400) == refused
    assert 404 == (await client.post("/tokenize", json={})).status_code


@pytest.mark.parametrize("base", ["/v1", ""])
@pytest.mark.parametrize("name", UNSERVED)
async def test_a_route_of_other_servers_is_refused_by_name(client, name, base):
    for method, path in (("POST", name), ("GET", f"{name}/some-id"), ("DELETE", f"{name}/a/b")):
        answer = await client.request(method, f"{base}/{path}")
        assert 404 == answer.status_code
        assert (
            f"/v1/{name} is not served here: {UNSERVED[name]}. This server has "
            "/v1/chat/completions, /v1/responses, /v1/messages and /v1/completions, with 'bytes'."
        ) == answer.json()["error"]["message"]


async def test_refused_routes_do_not_hide_what_is_served(client):
    assert 200 == (await client.get("/v1/models")).status_code
    answer = await client.get("/v1/models/files")
    assert "files" in answer.text
    assert "is not served here; served: 'bytes'" in answer.text


def test_the_first_page_names_what_is_not_served():
    said = re.search(r"It serves no ([^.]*)\(", README)
    assert said is not None
    for name in ("embeddings", "audio", "images", "files", "batches", "moderations", "reranking"):
        assert name in said[1]


def test_the_error_table_is_the_code():
    told = set(re.findall(r"^\| (\d{3}) \| `(\w+)` \|", PAGE, re.MULTILINE))
    rows = {(str(row.status), row.code) for row in [*TABLE.values(), UNEXPECTED]}
    routes = {(str(status), code) for status, code in ROUTE_CODES.items()}
    assert rows | routes == told


async def test_every_route_is_documented(app):
    paths = set(app.openapi()["paths"])
    told = {path for _, path in re.findall(r"^\| `(GET|POST) (/\S+)` \|", PAGE, re.MULTILINE)}
    assert paths == told


def test_every_field_is_documented():
    fields = {*ChatBody.model_fields, *CompletionBody.model_fields} - NOT_TOLD
    missing = {name for name in fields if f"`{name}`" not in PAGE and f"`{name}:" not in PAGE}
    assert not missing
    assert all(f"`{name}:" in PAGE for name in Extension.model_fields)
