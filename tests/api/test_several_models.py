"""Several models on one port, each with an engine of its own: here, at a URL, behind a relay. And
adapters, which are models beside their parent."""

import asyncio
import threading
from collections import Counter
from contextlib import asynccontextmanager
from decimal import Decimal
from unittest.mock import Mock

import anyio
import pytest

from billing.gate.holds import decode_request
from engine.errors import EngineAway
from engine.models.describe import describe_folder
from engine.remote import upstreams
from engine.remote.find import PROBE
from tests.api.real_service import served as serving
from tests.api.relaying import charges
from tests.patience import PATIENCE_S
from tests.support.billing import entries_of
from tests.support.models import save_tiny_adapter, save_tiny_model
from tests.support.remote_engine import DONE, RemoteEngineServer, vllm_about, vllm_chunk, vllm_usage
from tests.support.stand_in import WAIT, served
from tests.support.upstream import CHAT, MESSAGES, body, stream_of
from tiers.remote import breaker

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
PROMPT = "x" * 40  # a token each
NAMES = ["small", "there", "one", "two"]


@pytest.fixture
def engine(tiny, tmp_path):
    spoken = describe_folder(str(tiny), tmp_path)
    about = vllm_about(spoken.tokenizer.encode(PROBE).tolist(), str(tiny))
    with served(RemoteEngineServer(about, COMPLETIONS)) as server:
        server.script = [vllm_chunk([72]), vllm_chunk([105], "stop"), vllm_usage(40, 32), DONE]
        yield server


@pytest.fixture
def up(up):
    up.cards = [{"id": f"inner-{n}", "max_model_len": 4000} for n in ("one", "two")]
    return up


@pytest.fixture
def start(tiny, engine, up, tmp_path):
    @asynccontextmanager
    async def start(**more):
        relay = {"engine": f"openai+{up.url}", "key": "sk-inside"}
        models = [
            {"name": str(tiny), "served_as": "small", "device": "cpu"},
            {"name": str(tiny), "served_as": "there", "engine": engine.url},
            {"name": "inner-one", "served_as": "one", **relay},
            {"name": "inner-two", "served_as": "two", **relay},
        ]
        async with serving(tmp_path / "data", None, models=models, **more) as pair:
            yield pair

    return start


def completion(model):
    return {"model": model, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}


async def test_each_model_is_served_by_its_own_engine_and_charged_under_its_name(start, engine, up):
    async with start() as (service, client):
        cards = (await client.get("/v1/models")).json()["data"]
        assert NAMES == [card["id"] for card in cards]
        assert [4000, 4000] == [card["context_length"] for card in cards[2:]]
        assert all(card["pricing"]["prompt"] for card in cards)
        can = [card.get("supported_parameters", []) for card in cards]
        assert [can[0], can[0], [], []] == can and {"seed", "tools"} < {*can[0]}
        for model in ("small", "there", "small"):
            answer = await client.post(COMPLETIONS, json=completion(model))
            assert (200, model) == (answer.status_code, answer.json()["model"])
        for model in ("one", "two"):
            assert 200 == (await client.post(CHAT, json=body(CHAT, model=model))).status_code
        assert ["inner-one", "inner-two"] == [asked["model"] for _, _, asked in up.asked]
        assert 1 == len(engine.asked)
        told = [
            (decode_request(entry.body)[0].model, entry.details["usage"].get("hit_device", 0))
            for entry in charges(service)
        ]
        assert told == [("small", 0), ("there", 32), ("small", 39), ("one", 64), ("two", 64)]
        unknown = await client.post(COMPLETIONS, json=completion("inner-one"))
        assert 404 == unknown.status_code
        assert "served: 'small', 'there', 'one', 'two'" in unknown.text


async def test_what_only_blocks_here_allow_is_refused_for_the_other_models(start):
    async with start() as (service, client):
        kept = {"prompt": PROMPT, "ttl": "1h"}
        answer = await client.post("/v1/caches", json={**kept, "model": "small", "name": "mine"})
        assert 200 == answer.status_code, answer.text
        elsewhere = await client.post("/v1/caches", json={**kept, "model": "there"})
        assert 400 <= elsewhere.status_code < 500
        assert "cannot be kept" in elsewhere.text
        [cache] = (await client.get("/v1/caches")).json()["data"]
        assert ("mine", "small") == (cache["id"], cache["model"])
        assert 200 == (await client.delete("/v1/caches/mine")).status_code
        operator = {"authorization": f"Bearer {service.dashboard.parts.operator_token}"}
        order = {"kind": "tenant", "name": "default", "why": "asked"}
        purged = await client.post("/admin/api/cache/purge", json=order, headers=operator)
        assert ["there", "one", "two"] == purged.json()["not_reached"], purged.text
        await client.post(COMPLETIONS, json=completion("small"))
        for model, hits in (("small", 32), ("there", 0)):
            quote = await client.post("/v1/cache/quote", json=completion(model))
            assert hits == quote.json()["hit_tokens"], quote.text


async def test_an_engine_that_is_down_or_full_is_its_own_models_alone(start, engine, up):
    async with start(engine_max_waiting=4) as (service, client):  # three for one tenant
        up.script = {CHAT: [WAIT, *stream_of(CHAT)]}
        slow = [
            asyncio.create_task(client.post(CHAT, json=body(CHAT, model="one", stream=True)))
            for _ in range(3)
        ]
        while len(up.asked) < 3:
            await asyncio.sleep(0.005)
        assert 503 == (await client.post(CHAT, json=body(CHAT, model="one"))).status_code
        assert 200 == (await client.post(COMPLETIONS, json=completion("small"))).status_code
        up.go.set()
        assert {200} == {answer.status_code for answer in await asyncio.gather(*slow)}
        engine.status = 500
        while "ready" == (await client.get("/health/ready")).json()["models"]["there"]:
            await client.post(COMPLETIONS, json=completion("there"))
        ready = await client.get("/health/ready")
        assert 200 == ready.status_code
        others = {"small": "ready", "one": "ready", "two": "ready"}
        assert others | {"there": "no engine of the model answers"} == ready.json()["models"]
        stats = service._watch.sources.engine()
        assert [("there", False), ("one", True), ("two", True)] == [
            (use.model, use.is_up) for use in stats.engines
        ]


async def sent(client, model):
    """A request in each protocol that the tests ask for, to a model that is absent."""
    messages = [{"role": "user", "content": "x"}]
    for path, told in {
        COMPLETIONS: completion(model) | {"stream": True, "cachesvc": {"details": True}},
        CHAT: {"model": model, "messages": messages},
        MESSAGES: {"model": model, "messages": messages, "max_tokens": 2},
    }.items():
        answer = await client.post(path, json=told)
        assert (503, "5") == (answer.status_code, answer.headers["retry-after"]), answer.text
        yield path, answer.json()


@pytest.mark.parametrize("main", [True, False])
async def test_a_model_whose_engine_is_away_at_the_start_is_served_once_that_is_what_it_should_be(
    tiny, engine, up, tmp_path, monkeypatch, caplog, main
):
    """Until then it is listed without a context, and a request for it is free, and in the
    journal. It may be the first of the list; the others are served."""
    monkeypatch.setattr(upstreams, "JOIN_S", 0.02)
    for name in ("FIRST_PAUSE_S", "MOST_PAUSE_S"):
        monkeypatch.setattr(breaker, name, 0.02)
    right, up.lists = engine.about["/version"], 503 if main else 200
    engine.about["/version"] = (503, {})
    there = {"name": str(tiny), "served_as": "there", "engine": engine.url}
    models = [there, {"name": "inner-one", "served_as": "one", "engine": f"openai+{up.url}"}]
    models += [{"name": str(tiny), "served_as": "small", "device": "cpu"}] * main
    waiting = ["there", "one"] if main else ["there"]
    async with serving(tmp_path / "data", None, models=models) as (service, client):

        async def until(url, told):
            with anyio.fail_after(PATIENCE_S):
                while told != (await client.get("/health/ready")).json().get("engines", {}).get(
                    url
                ):
                    await anyio.sleep(0.02)

        async def contexts():
            cards = (await client.get("/v1/models")).json()["data"]
            return [(card["id"], card["context_length"]) for card in cards]

        assert [each["served_as"] for each in models] == [name for name, _ in await contexts()]
        assert waiting == [name for name, length in await contexts() if length is None]
        assert (await client.get("/v1/models/there")).json()["pricing"]["prompt"]
        ready = await client.get("/health/ready")
        assert 200 == ready.status_code
        assert waiting == [n for n, told in ready.json()["models"].items() if told != "ready"]
        for name in waiting:
            assert f"{name} is served once it answers" in caplog.text
            async for path, told in sent(client, name):
                assert "No engine of this model" in told["error"]["message"]
                kind = "overloaded_error" if path == MESSAGES else "server_error"
                assert kind == told["error"]["type"]
        counted = {"model": "there", "messages": [{"role": "user", "content": "x"}]}
        assert 503 == (await client.post("/v1/messages/count_tokens", json=counted)).status_code
        refused = list(service._memory.records.journal.newest())
        assert {(n, "refused", 503) for n in waiting} == {
            (each.model, each.state, each.failure.status) for each in refused
        }
        assert 3 * len(waiting) == len(refused)
        assert [] == entries_of(service._money.books.store, "default")
        served = "small" if main else "one"
        path, told = (COMPLETIONS, completion(served)) if main else (CHAT, body(CHAT, model="one"))
        assert 200 == (await client.post(path, json=told)).status_code
        uses = service._watch.sources.engine().engines
        assert {n: n not in waiting for n in ("there", "one")} == {u.model: u.is_up for u in uses}

        tokens = engine.about["/tokenize"]
        engine.about |= {"/version": right, "/tokenize": {"tokens": [1]}}
        await until(engine.url, "is refused; the log says why")
        assert "has another tokenizer" in caplog.text
        async for _ in sent(client, "there"):
            assert [] == engine.asked
        noting = Mock(side_effect=[OSError("the disk is full"), None, None])
        monkeypatch.setattr("cachesvc.service.note_scopes", noting)
        engine.about["/tokenize"] = tokens
        await until(engine.url, None)
        names = [each.name for each in threading.enumerate()]
        assert (2, 1 + main) == (noting.call_count, names.count("cachesvc-engine"))
        answer = await client.post(COMPLETIONS, json=completion("there"))
        assert (200, "there") == (answer.status_code, answer.json()["model"])
        assert (models[0]["served_as"], 100) == (await contexts())[0]
        up.cards, up.lists = [up.cards[0]], 200
        await until(up.url, None)
        assert 200 == (await client.post(CHAT, json=body(CHAT, model="one"))).status_code
        ready = (await client.get("/health/ready")).json()["models"]
        assert dict.fromkeys(["there", "one", *["small"] * main], "ready") == ready


async def test_a_server_of_several_models_starts_with_one_of_them_at_least(
    tiny, engine, up, tmp_path
):
    engine.about["/version"], up.lists = (503, {}), 503
    models = [
        {"name": str(tiny), "served_as": "there", "engine": engine.url},
        {"name": "inner-one", "engine": f"openai+{up.url}"},
    ]
    with pytest.raises(EngineAway, match=engine.url):
        async with serving(tmp_path / "data", None, models=models):
            pass


async def test_metrics_tell_models_at_one_url_apart(start, up):
    async with start() as (_, client):
        await client.post(CHAT, json=body(CHAT, model="two"))
        lines = (await client.get("/metrics")).text.splitlines()
        names = Counter(line.rpartition(" ")[0] for line in lines if not line.startswith("#"))
        assert [] == [name for name, count in names.items() if count > 1]
        told = f'cachesvc_engine_prompt_tokens_total{{engine="{up.url}",model="%s"}} %s'
        assert told % ("one", "0.0") in lines
        assert told % ("two", "100.0") in lines
        assert told.replace("prompt", "hit") % ("two", "64.0") in lines


HELLO = {
    "messages": [{"role": "user", "content": "Call me Ishmael. " * 8}],
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
    "cachesvc": {"details": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    save_tiny_model(folder / "model")
    for number in range(2):
        save_tiny_adapter(folder / f"a{number}", seed=number, r=4, target_modules="all-linear")
    return folder


async def ask(client, model):
    response = await client.post(CHAT, json=HELLO | {"model": model})
    answer = response.json()
    assert (200, model) == (response.status_code, answer["model"]), answer
    return answer["choices"][0]["message"]["content"], answer


async def test_adapters_are_models_beside_their_parent(folders, tmp_path):
    base = str(folders / "model")
    adapters = {"sql": str(folders / "a0"), "legal": str(folders / "a1")}
    async with serving(tmp_path, folders / "model", model_adapters=adapters) as (_, client):
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(base, None), ("sql", base), ("legal", base)] == [
            (card["id"], card["parent"]) for card in cards
        ]
        assert {base} == {card["root"] for card in cards}
        cold = {name: await ask(client, name) for name in (base, *adapters)}
        assert 3 == len({text for text, _ in cold.values()})
        for name in (base, *adapters):
            text, answer = await ask(client, name)
            assert cold[name][0] == text
            assert 0 == cold[name][1]["usage"]["prompt_cache_hit_tokens"]
            assert 1 == answer["usage"]["prompt_cache_miss_tokens"]
            assert Decimal(answer["cachesvc"]["cost"]["amount"]) > 0
        refused = await client.post(CHAT, json=HELLO | {"model": "medical"})
        assert 404 == refused.status_code
        assert "'sql', 'legal'" in refused.json()["error"]["message"]
    # After a restart the names have changed hands; what is on disk goes by content.
    adapters = {"sql": str(folders / "a1"), "new": str(folders / "a0")}
    async with serving(tmp_path, folders / "model", model_adapters=adapters) as (_, client):
        for name, before in (("sql", "legal"), ("new", "sql"), (base, base)):
            text, answer = await ask(client, name)
            assert cold[before][0] == text
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]["disk"] > 0
