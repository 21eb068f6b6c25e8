"""A server before an engine at a URL: what its client sees and pays, whatever the engine does.

The engine is a stand-in that speaks real HTTP, as vLLM 0.32 and SGLang's documentation do.
"""

import socket
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest

from engine.errors import EngineAway, ModelError
from engine.models.describe import describe_folder
from engine.remote import client as client_module
from engine.remote import engine as engine_module
from engine.remote import upstreams as upstreams_module
from engine.remote.find import PROBE
from tests.api import relaying
from tests.api.conftest import of, refusal, until_engines
from tests.api.driver import Visit
from tests.api.real_service import served as serving
from tests.api.relaying import usage_of
from tests.api.test_admin_pages import PAGES
from tests.patience import PATIENCE_S
from tests.support.remote_engine import (
    DONE,
    RemoteEngineServer,
    event,
    sglang_about,
    sglang_chunk,
    vllm_about,
    vllm_chunk,
    vllm_usage,
)
from tests.support.stand_in import RESET, Script, served
from tiers.remote import breaker as breaker_module

pytestmark = pytest.mark.anyio
PROMPT = "x" * 40  # a token each
HELLO = (72, 105)  # H i


@pytest.fixture(scope="module")
def probe(tiny, tmp_path_factory):
    spoken = describe_folder(str(tiny), tmp_path_factory.mktemp("cache"))
    return spoken.tokenizer.encode(PROBE).tolist()


@pytest.fixture
def at(tiny, tmp_path, monkeypatch):
    """Serves the model of these engines, named as an operator does who stands beside it."""
    monkeypatch.chdir(tiny.parent)

    def serve(*engines, data_dir=tmp_path, **more):
        urls = [each.url for each in engines]
        urls = urls if urls[1:] else urls[0]
        return serving(data_dir, Path(tiny.name), engine_backend=urls, **more)

    return serve


@pytest.fixture
def engine(probe):
    with served(RemoteEngineServer(vllm_about(probe, "tiny"))) as server:
        yield server


def body(**more):
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, **more}


def charges(service):
    """The usage of what was charged, of the tenant without a key."""
    return [usage_of(entry) for entry in relaying.charges(service) if entry.amount]


ANSWER = [vllm_chunk([72]), vllm_chunk([105], "stop"), vllm_usage(40, 32), DONE]
ERROR = {"error": {"message": "secret words"}}
BEGUN = [vllm_chunk([72]), vllm_chunk([105])]
# What the engine does, and what the client gets: its status, code and words.
BEFORE: dict[str, tuple[int, Script, tuple[int, str, str]]] = {
    "500": (500, (), (502, "engine_fault", "answered 500")),
    "400": (400, (), (502, "engine_fault", "answered 400")),
    "503": (503, (), (503, "engine_unavailable", "cannot serve now")),
    "429": (429, (), (429, "engine_overloaded", "overloaded")),
    "reset": (200, [RESET], (502, "engine_fault", "broke off")),
    "silent": (200, [3.0], (504, "engine_timeout", "timed out")),
    "an error": (200, [event(ERROR)], (502, "engine_fault", "with an error")),
    "no JSON": (200, [b"data: {secret words\n\n"], (502, "engine_fault", "cannot be read")),
    "no event of vLLM's": (200, [event({"chunk": 1})], (502, "engine_fault", "cannot be read")),
}
SENT = 1.0  # so that the client has the first tokens
AFTER: dict[str, tuple[Script, str]] = {
    "reset": ([*BEGUN, SENT, 0.2, RESET], "engine_fault"),
    "silent": ([*BEGUN, 5.0], "engine_timeout"),
    "an end without an end": ([*BEGUN, SENT], "engine_fault"),
    "an error": ([*BEGUN, SENT, event(ERROR), DONE], "engine_fault"),
    "no id": ([*BEGUN, SENT, vllm_chunk([-1]), vllm_chunk([105], "length"), DONE], "engine_fault"),
    "a text": ([*BEGUN, SENT, vllm_chunk("Hi"), vllm_chunk([105], "length"), DONE], "engine_fault"),
    "without an end": ([*BEGUN, *[b": here\n\n", 0.05] * 2000], "engine_timeout"),
}


async def test_a_request_is_served_and_billed_by_what_the_engine_had(engine, at):
    engine.script = ANSWER
    async with at(engine) as (service, client):
        answer = await client.post("/v1/completions", json=body())
        assert 200 == answer.status_code, answer.text
        assert "H" == answer.json()["choices"][0]["text"]
        assert [{"hit_device": 32, "miss": 8, "output": 2}] == charges(service)
        streamed = await client.post("/v1/completions", json=body(stream=True))
        assert streamed.text.rstrip().endswith("[DONE]")
        assert 2 == len(charges(service))
        metrics = (await client.get("/metrics")).text
        assert 'cachesvc_miss_tokens_total{reason="tail"} 16.0' in metrics
        (first, _) = engine.asked
        assert 40 == len(first["prompt"]) and first["return_token_ids"] and first["stream"]
        assert first["cache_salt"].startswith("hex:")


@pytest.mark.parametrize("fault", BEFORE)
@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token_the_client_gets_an_error_and_pays_nothing(
    engine, at, monkeypatch, fault, stream
):
    async with at(engine) as (service, client):
        engine.status, engine.script, (status, code, why) = BEFORE[fault]
        engine.sent_headers = {"retry-after": "7"}
        monkeypatch.setattr(client_module, "SILENCE_S", 0.5)
        answer = await client.post("/v1/completions", json=body(stream=stream))
        assert status == answer.status_code
        error = answer.json()["error"]
        assert code == error["code"]
        if status in (429, 503):
            assert "7" == answer.headers["retry-after"]
        assert why in error["message"] and "secret" not in answer.text
        assert "127.0.0.1" not in answer.text
        assert [] == charges(service)
        message = {"model": "tiny", "max_tokens": 8, "stream": stream}
        messages = [{"role": "user", "content": "x"}]
        answer = await client.post("/v1/messages", json={**message, "messages": messages})
        assert ("error", status) == (answer.json()["type"], answer.status_code)
        kinds = {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}
        assert kinds.get(status, "api_error") == answer.json()["error"]["type"]
        assert [] == charges(service)
        assert service.core.engine.failure is None, "the next one may be served"


async def test_an_engine_that_finds_fault_with_requests_serves_the_others(engine, at, monkeypatch):
    """A tenant's requests must not take it from all."""
    monkeypatch.setattr(breaker_module, "FAILURES", 1)
    monkeypatch.setattr(upstreams_module, "JOIN_S", 0.02)
    async with at(engine) as (service, client):
        engine.status = 400
        assert 502 == (await client.post("/v1/completions", json=body())).status_code
        engine.status, engine.script = 200, ANSWER
        assert 200 == (await client.post("/v1/completions", json=body())).status_code
        engine.status, engine.about["/v1/models"] = 404, {"data": []}
        assert 502 == (await client.post("/v1/completions", json=body())).status_code
        await until_so(lambda: not service.core.engine.stats().engines[0].is_up)
        assert 503 == (await client.get("/health/ready")).status_code, "it has no such model"


@pytest.fixture
def other(probe):
    with served(RemoteEngineServer(vllm_about(probe, "tiny"))) as server:
        server.script = ANSWER
        yield server


@pytest.mark.parametrize("fault", [*BEFORE, "refused"])
async def test_what_fails_before_its_first_token_is_tried_once_on_another_engine(
    engine, other, at, monkeypatch, fault
):
    async with at(engine, other) as (service, client):
        monkeypatch.setattr(client_module, "SILENCE_S", 0.5)
        if fault == "refused":
            engine.shutdown()
            engine.server_close()
        else:
            engine.status, engine.script, _ = BEFORE[fault]
        answer = await client.post("/v1/completions", json=body())
        assert "H" == answer.json()["choices"][0]["text"], answer.text
        assert 1 == len(other.asked)
        assert [{"hit_device": 32, "miss": 8, "output": 2}] == charges(service)
        other.status = 500
        answer = await client.post("/v1/completions", json=body())
        assert answer.status_code >= 429, "both have failed"
        assert (2, 1) == (len(other.asked), len(charges(service)))
        text = (await client.get("/metrics")).text
        values = {"up": 1, "requests": 0, "prompt_tokens_total": 40, "hit_tokens_total": 32}
        for name, value in {**values, "errors_total": 1}.items():
            assert f'cachesvc_engine_{name}{{engine="{other.url}",model="tiny"}} {value}.0' in text
        assert f'cachesvc_engine_errors_total{{engine="{engine.url}",model="tiny"}} 2.0' in text
        headers = {"authorization": f"Bearer {service.dashboard.parts.operator_token}"}
        page = (await client.get("/admin", headers=headers)).text
        row = f"<td>{other.url}</td><td>tiny</td><td>up</td><td>0</td><td>80 %</td><td>1</td>"
        assert row in page


async def test_what_fails_after_its_first_token_is_tried_nowhere_else(engine, other, at):
    engine.script = [*BEGUN, RESET]
    async with at(engine, other) as (_, client):
        answer = await client.post("/v1/completions", json=body())
        assert (502, []) == (answer.status_code, other.asked)


async def until_so(is_so):
    with anyio.fail_after(PATIENCE_S):
        while not is_so():
            await anyio.sleep(0.02)


async def test_a_server_is_ready_while_one_of_its_engines_answers(engine, other, at, monkeypatch):
    """Nobody has to send a request for that. One that comes back is checked as at the start."""
    monkeypatch.setattr(engine_module, "LOOK_S", 0.02)
    monkeypatch.setattr(upstreams_module, "JOIN_S", 0.02)
    monkeypatch.setattr(breaker_module, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(breaker_module, "MOST_PAUSE_S", 0.1)
    async with at(engine, other) as (service, client):

        async def until(is_up):
            use = service.core.engine.stats
            await until_so(lambda: is_up == [each.is_up for each in use().engines])
            return await client.get("/health/ready")

        right = dict(other.about)
        engine.about["/health"] = engine.about["/version"] = (503, {})
        assert 200 == (await until([False, True])).status_code
        other.about["/health"] = other.about["/version"] = (503, {})
        refused = await until([False, False])
        assert (503, True) == (refused.status_code, "no engine of the model" in refused.text)
        answer = await client.post("/v1/completions", json=body())
        assert (503, "engine_unavailable") == (answer.status_code, answer.json()["error"]["code"])
        assert [] == engine.asked + other.asked, "those that are left alone are not asked"
        assert 200 == (await client.get("/health")).status_code
        other.about |= right | {"/health": {}, "/tokenize": {"tokens": [1]}}
        refused = {engine.url: "does not answer", other.url: "is refused; the log says why"}
        await until_engines(client, refused)
        assert 503 == (await client.post("/v1/completions", json=body())).status_code
        assert [] == other.asked, "it is another model by now"
        other.about |= right
        assert 200 == (await until([False, True])).status_code
        answer = await client.post("/v1/completions", json=body())
        assert (200, 1) == (answer.status_code, len(other.asked))


async def test_an_engine_that_comes_later_is_used_once_it_is_what_the_others_are(
    engine, other, probe, at, monkeypatch, caplog
):
    """It is named until then, in readiness, in the metrics and in the log. So is one that is none
    of the model's. The first of the list may be missing as well."""
    monkeypatch.setattr(upstreams_module, "JOIN_S", 0.02)
    for name in ("FIRST_PAUSE_S", "MOST_PAUSE_S"):
        monkeypatch.setattr(breaker_module, name, 0.02)
    engine.script = ANSWER
    right = dict(other.about)
    other.about["/version"] = (503, {})
    async with at(other, engine) as (_, client):

        async def is_up():
            text = (await client.get("/metrics")).text
            return f'cachesvc_engine_up{{engine="{other.url}",model="tiny"}} 1.0' in text

        await until_engines(client, {other.url: "does not answer"})
        assert other.url in caplog.text and "it is used once it answers" in caplog.text
        card = right["/v1/models"]["data"][0]
        wrong = {
            "does not serve tiny": {"/v1/models": {"data": [card | {"id": "x", "root": "/m/x"}]}},
            "has another tokenizer": {"/tokenize": {"tokens": [*probe[:-1], 1]}},
            "64 tokens, not 100": {"/v1/models": {"data": [card | {"max_model_len": 64}]}},
        }
        for why, change in wrong.items():
            other.about |= right | change
            await until_engines(client, {other.url: "is refused; the log says why"})
            await until_so(lambda why=why: why in caplog.text)
            assert 200 == (await client.post("/v1/completions", json=body())).status_code
            assert not await is_up() and [] == other.asked
            other.about["/version"] = (503, {})
            await until_engines(client, {other.url: "does not answer"})
        other.about |= right
        await until_engines(client, None)
        assert await is_up()
        engine.status = 500
        assert 200 == (await client.post("/v1/completions", json=body())).status_code
        assert 1 == len(other.asked)


async def test_a_server_does_not_start_while_none_of_its_engines_answers(engine, other, at):
    engine.about["/version"] = other.about["/version"] = (503, {})
    for engines in ([engine], [engine, other]):
        with pytest.raises(EngineAway, match=f"{engine.url} cannot be used: GET /version gives"):
            async with at(*engines):
                pass


@pytest.mark.parametrize("ability", ["priority", "structured_outputs"])
async def test_what_a_proxy_answers_is_no_word_of_what_the_engine_can(engine, at, ability):
    usual = engine.about["/v1/completions"]
    engine.about["/v1/completions"] = lambda asked: (503, {}) if ability in asked else usual
    with pytest.raises(EngineAway, match="completions gives 503"):
        async with at(engine):
            pass


async def test_another_engine_must_be_of_the_same_model_too(engine, other, at):
    card = {"id": "tiny", "root": "/m/tiny", "parent": None, "max_model_len": 64}
    for told, models in {"does not serve tiny": "x", "64 tokens, not 100": "tiny"}.items():
        other.about["/v1/models"] = {"data": [{**card, "id": models, "root": f"/m/{models}"}]}
        with pytest.raises(ModelError, match=f"{other.url}.*{told}"):
            async with at(engine, other):
                pass


@pytest.mark.parametrize("fault", AFTER)
async def test_after_the_first_token_a_stream_ends_with_an_error_and_pays_what_was_sent(
    engine, at, monkeypatch, fault
):
    async with at(engine, engine_max_time=3) as (service, client):
        engine.script, code = AFTER[fault]
        monkeypatch.setattr(client_module, "SILENCE_S", 2.0)
        answer = await client.post("/v1/completions", json=body(stream=True))
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        assert code == orjson.loads(events[-1])["error"]["code"]
        assert [{"miss": 40, "unreported": 40, "output": 2}] == charges(service)
        whole = await client.post("/v1/completions", json=body())
        assert whole.status_code in (502, 504)
        assert 1 == len(charges(service)), "of an answer sent whole nothing was sent"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_pays_the_prompt_once_the_engine_has_it(engine, at, stream):
    """It may be computed, and nothing tells. A body that nobody takes is none."""
    engine.script = [2.0, *[vllm_chunk([72]), 0.02] * 2000]
    async with at(engine) as (service, client):
        app = client._transport.app

        def begun():
            return service.core.engine.stats().engines[0].num_in_flight

        visit = Visit(app, "/v1/completions", body(stream=stream), host="localhost").start()
        await visit.leave_when(lambda: bool(engine.asked))
        assert engine.left.wait(30) and begun() == 0
        assert [{"miss": 40, "unreported": 40}] == charges(service)
        metrics = (await client.get("/metrics")).text
        assert 'cachesvc_miss_tokens_total{reason="unreported"} 40.0' in metrics
        engine.shutdown()
        fillers = [socket.socket() for _ in range(2 * engine.request_queue_size)]
        for each in fillers:
            each.setblocking(False)
            each.connect_ex(engine.server_address)
        visit = Visit(app, "/v1/completions", body(stream=stream), host="localhost").start()
        await visit.leave_when(lambda: begun() == 1)
        for each in fillers:
            each.close()
        assert 1 == len(charges(service))


async def test_a_count_that_cannot_be_is_not_guessed_and_the_prompt_is_a_miss(engine, at):
    async with at(engine) as (service, client):
        for engine.script in ([*ANSWER[:2], DONE], [*ANSWER[:2], vllm_usage(40, 41), DONE]):
            answer = await client.post("/v1/completions", json=body())
            assert 200 == answer.status_code, answer.text
        assert [{"miss": 40, "unreported": 40, "output": 2}] * 2 == charges(service)
        metrics = (await client.get("/metrics")).text
        assert 'cachesvc_miss_tokens_total{reason="unreported"} 80.0' in metrics


async def test_a_stop_string_is_ended_by_the_engine_so_that_its_usage_comes(engine, at):
    end = vllm_chunk([105], "stop", stop_reason="i")
    engine.script = [vllm_chunk([72]), end, 0.05, vllm_usage(40, 32), DONE]
    async with at(engine) as (service, client):
        answer = await client.post("/v1/completions", json=body(stop=["i"]))
        choice = answer.json()["choices"][0]
        assert ("H", "stop") == (choice["text"], choice["finish_reason"])
        assert ["i"] == engine.asked[0]["stop"]
        assert [{"hit_device": 32, "miss": 8, "output": 2}] == charges(service)


async def test_a_vllm_that_was_started_for_token_ids_is_asked_by_that_route(probe, at):
    about = vllm_about(probe, "tiny", scale_out=True)
    with served(RemoteEngineServer(about, "/inference/v1/generate")) as engine:
        engine.script = ANSWER
        async with at(engine) as (service, client):
            answer = await client.post("/v1/completions", json=body(seed=5))
            assert "H" == answer.json()["choices"][0]["text"]
            assert [{"hit_device": 32, "miss": 8, "output": 2}] == charges(service)
            (asked,) = engine.asked
            assert (40, 5) == (len(asked["token_ids"]), asked["sampling_params"]["seed"])


async def test_sglang_tells_its_hits_with_each_event(probe, at):
    """Also where its events repeat the tokens before."""
    with served(RemoteEngineServer(sglang_about(probe, "tiny"), "/generate")) as engine:
        prompt: dict[str, Any] = {"prompt_tokens": 40}
        end = {"type": "length", "length": 3}
        engine.script = [
            sglang_chunk([72], 1, **prompt),
            sglang_chunk([72, 105], 2, **prompt),
            sglang_chunk([72, 105, 33], 3, end, **prompt),
            DONE,
        ]
        async with at(engine) as (service, client):
            answer = await client.post("/v1/completions", json=body(logit_bias={"5": 1}))
            assert "Hi!" == answer.json()["choices"][0]["text"]
            usage = {"hit_device": 16, "miss": 24, "output": 3, "cache_write": 24}
            assert [usage] == charges(service)
            asked = engine.asked[0]
            assert 40 == len(asked["input_ids"]) and asked["extra_key"].startswith("hex:")
            assert (-1, {"5": 1.0}) == of(asked["sampling_params"], "top_k", "logit_bias")
            for name, value in {"seed": 5, "structured_outputs": {"regex": "a"}}.items():
                refused = await client.post("/v1/completions", json=body(**{name: value}))
                assert (400, name) == (refused.status_code, refused.json()["error"]["param"])
            tiers = {"device": 4, "host": 2, "storage": 10, "storage_backend": "file"}
            for told in (tiers, tiers | {"storage": 11}, tiers | {"host": None}):
                more = prompt | {"cached_tokens_details": told}
                engine.script = [sglang_chunk([72, 105, 33], 3, end, **more), DONE]
                await client.post("/v1/completions", json=body())
            by_tier = {"hit_device": 4, "hit_host": 2, "hit_disk": 10}
            assert [usage | by_tier, usage, usage] == charges(service)[1:]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, "a context of 100 tokens, not 64"),
        ({"/v1/models": {"data": [{"id": "other", "root": "/m/other"}]}}, "does not serve tiny"),
        ({"/v1/models": (401, {})}, r"wants another engine\.key"),
        ({"/version": (401, {}), "/v1/models": (401, {})}, r"wants another engine\.key"),
        ({"/tokenize": {"tokens": [1, 2, 3]}}, "another tokenizer"),
        ({"/tokenize": None}, "how it tokenizes"),
        ({"/version": None, "/v1/models": (500, {})}, "neither vLLM nor SGLang"),
        ({"/v1/completions": {"choices": [{}]}}, "gives no token ids"),
    ],
)
async def test_another_engine_than_meant_is_refused_at_the_start(engine, at, change, told):
    engine.about |= change
    asked = {} if change else {"engine_vllm": {"max-model-len": 64}}
    with pytest.raises(ModelError, match=told):
        async with at(engine, **asked):
            pass


async def test_the_engines_key_goes_with_each_request_and_no_header_of_the_tenants_does(
    engine, at, tmp_path, caplog
):
    """The log has no key, even if the engine repeats it."""
    caplog.set_level("DEBUG")
    engine.key, engine.script = "sk-for-the-engine", ANSWER
    headers = {"cookie": "a=b", "x-of-mine": "c"}
    async with at(engine, engine_key=engine.key) as (_, client):
        answer = await client.post("/v1/completions", json=body(), headers=headers)
        assert 200 == answer.status_code
        assert {"authorization", "user-agent"} < set(engine.asked_headers[-1])
        assert not {"cookie", "x-of-mine"} & set(engine.asked_headers[-1])
        engine.status, engine.error = 500, f"what is {engine.key}?"
        assert 502 == (await client.post("/v1/completions", json=body())).status_code
        engine.status, engine.script = 200, [event({"error": engine.error})]
        assert 502 == (await client.post("/v1/completions", json=body())).status_code
    assert "what is ***?" in caplog.text and engine.key not in caplog.text
    with pytest.raises(ModelError, match=r"wants another engine\.key"):
        async with at(engine, data_dir=tmp_path / "other"):
            pass


async def test_what_needs_blocks_in_this_process_says_so_by_name(engine, at):
    engine.script = ANSWER
    async with at(engine) as (service, client):
        client.headers["authorization"] = f"Bearer {service.dashboard.parts.operator_token}"
        cached = body(cache_control={"type": "ephemeral"})
        answer = await client.post("/v1/completions", json=cached)
        assert 200 == answer.status_code, answer.text
        for path in ("/admin/api/cache/tree", "/admin/api/cache/owners"):
            refused = await client.get(path)
            assert (404, "not_served") == (refused.status_code, refused.json()["error"]["code"])
            assert "in another process" in refused.text
        evicted = {"keys": ["00" * 16], "why": "a test"}
        refused = await client.post("/admin/api/cache/evict", json=evicted)
        assert (404, "not_served") == refusal(refused)
        pinned = {"name": "a", "key": "00" * 16, "for_s": 60, "why": "a test"}
        assert "another process" in (await client.post("/admin/api/cache/pin", json=pinned)).text
        page = await client.get("/admin/explorer")
        assert (200, True) == (page.status_code, "The engine has the blocks" in page.text)
        quote = (await client.post("/v1/cache/quote", json=body())).json()
        assert (40, 0, False) == of(quote, "miss_tokens", "hit_tokens", "hits_known")
        assert 1 == len(engine.asked)
        number = answer.headers["x-request-id"]
        for name in ("cache", *PAGES, "tenants/default", f"requests/{number}"):
            assert 200 == (await client.get(f"/admin/{name}")).status_code, name


async def test_what_ends_here_is_ended_in_the_engine_and_billed_as_a_miss(engine, at):
    """Nothing tells what it had cached when its answer is cut off."""
    engine.script = [vllm_chunk([72]), *[vllm_chunk([105]), 0.02] * 2000]
    async with at(engine) as (service, client):
        answer = await client.post("/v1/completions", json=body(stop=["ii"]))
        assert "H" == answer.json()["choices"][0]["text"]
        assert engine.left.wait(30)
        assert [{"miss": 40, "unreported": 40, "output": 3}] == charges(service)
