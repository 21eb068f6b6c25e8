"""Quotes: what a request would hit and cost."""

import pytest

from tests.api.conftest import of, running
from tests.support.wire import Script, fake_house

QUOTE = "/v1/cache/quote"
MESSAGES = [{"role": "user", "content": "Where is it warm in March?"}]
PROMPT = len("user: Where is it warm in March?\nassistant: ")


async def survey(job):
    return [{"device": 10, "disk": 6} for _ in job.prompts]


@pytest.fixture
def house():
    return fake_house(survey=survey)


@pytest.fixture
async def client(house):
    async with running(house) as (_, client):
        yield client


def chat(**fields):
    return {"model": "bytes", "messages": MESSAGES, "max_tokens": 5, **fields}


async def test_a_quote_computes_nothing_and_says_tokens_and_price(client, house):
    house.engine.script = Script(wait_s={"local": 0.25})
    quote = (await client.post(QUOTE, json=chat())).json()
    told = of(quote, "prompt_tokens", "hit_tokens", "miss_tokens")
    assert (PROMPT, 16, PROMPT - 16) == told
    assert {"device": 10, "host": 0, "disk": 6} == quote["hit_tokens_by_tier"]
    price = quote["price"]
    cost = f"{(16 + 10 * (PROMPT - 16)) / 1e6:.6f}"
    assert (cost, "test", "standard") == of(price, "prompt", "card", "window")
    assert float(price["at_most"]) == pytest.approx(float(price["prompt"]) + 5 * 20 / 1e6)
    assert [] == house.engine.requests and [] == house.meter.charges


async def test_a_completion_is_quoted_too(client):
    body = {"model": "bytes", "prompt": "x" * 40}
    assert 40 == (await client.post(QUOTE, json=body)).json()["prompt_tokens"]
    answer = await client.post(QUOTE, json={"model": "bytes"})
    assert (400, "prompt") == (answer.status_code, answer.json()["error"]["param"])


@pytest.mark.parametrize("name", ["require_hit", "max_price"])
async def test_limits_of_one_request_are_refused_with_the_quote_to_ask(client, house, name):
    answer = await client.post("/v1/chat/completions", json=chat(cachesvc={name: "1"}))
    error = answer.json()["error"]
    assert (400, "cachesvc") == (answer.status_code, error["param"])
    assert name in error["message"] and "POST /v1/cache/quote" in error["message"]
    assert [] == house.engine.requests and [] == house.meter.charges
