"""Adapters as clients see them: the real service over a tiny model, in process, with a ledger."""

from decimal import Decimal

import pytest

from tests.api.real_service import served
from tests.support.models import save_tiny_adapter, save_tiny_model

CHAT = "/v1/chat/completions"
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
    async with served(tmp_path / "data", folders / "model", model_adapters=adapters) as (_, client):
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
    async with served(tmp_path / "data", folders / "model", model_adapters=adapters) as (_, client):
        for name, before in (("sql", "legal"), ("new", "sql"), (base, base)):
            text, answer = await ask(client, name)
            assert cold[before][0] == text
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]["disk"] > 0
