"""Real clients meet a hard limit: they raise at once, without a retry, and can read which it is."""

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from billing.errors import SpendLimitReached
from billing.gate.limits import Spender, Spending, SpendLimit, period_of, reached
from billing.money import UNITS
from tests.e2e.conftest import Server
from tests.support.wire import Script

MESSAGES: Any = [{"role": "user", "content": "hi"}]
NOW_NS = 2**62  # in 2116: the limit's end is still to come
PERIOD = period_of("month", NOW_NS)


def ask_chat(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="sk-any") as client:
        client.chat.completions.create(model="bytes", messages=MESSAGES, user="anna")


def ask_stream(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="sk-any") as client:
        client.chat.completions.create(model="bytes", messages=MESSAGES, stream=True)


def ask_responses(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="sk-any") as client:
        client.responses.create(model="bytes", input="hi")


def ask_messages(url: str) -> None:
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="sk-any") as client:
        client.messages.create(model="bytes", messages=MESSAGES, max_tokens=3)


def refusal() -> SpendLimitReached:
    limit = SpendLimit(name="cap", tenant="acme", amount=5 * UNITS, of="user", value="*")
    spender = Spender("cap", PERIOD, "anna")
    return reached(limit, spender, Spending(5 * UNITS), needed=UNITS, currency="CNY")


def cut_chat(url: str) -> Any:
    with openai.OpenAI(base_url=url, api_key="sk-any") as client:
        chunks = client.chat.completions.create(model="bytes", messages=MESSAGES, stream=True)
        [last] = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert "length" == last.choices[0].finish_reason
    return last


def cut_responses(url: str) -> Any:
    with (
        openai.OpenAI(base_url=url, api_key="sk-any") as client,
        client.responses.stream(model="bytes", input="hi") as stream,
    ):
        *_, last = stream
    assert last.type == "response.incomplete"
    return last.response


def cut_messages(url: str) -> Any:
    with (
        anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="sk-any") as client,
        client.messages.create(
            model="bytes", messages=MESSAGES, max_tokens=30, stream=True
        ) as stream,
    ):
        [last] = [event for event in stream if event.type == "message_delta"]
    assert "max_tokens" == last.delta.stop_reason
    return last


@pytest.mark.parametrize("cut", [cut_chat, cut_responses, cut_messages])
def test_a_client_reads_which_limit_ended_a_stream(
    server: Server, cut: Callable[[str], Any]
) -> None:
    server.house.engine.script = Script(answer="z" * 30)
    server.house.meter.budget = 6
    server.house.meter.refusal = refusal()
    told = cut(server.url).cachesvc
    assert ("spend_limit_reached", "cap") == (told["ended_by"], told["limit"]["name"])
    assert told["limit"]["ends_at"].endswith("-01T00:00:00Z")


@pytest.mark.parametrize("ask", [ask_chat, ask_stream, ask_responses, ask_messages])
def test_a_client_raises_and_tells_the_limit(server: Server, ask: Callable[[str], None]) -> None:
    server.house.meter.refuse = refusal()
    with pytest.raises((openai.RateLimitError, anthropic.RateLimitError)) as raised:
        ask(server.url)
    error: Any = raised.value
    body = error.body.get("error", error.body)  # Anthropic's client keeps the whole body
    told = body["limit"]
    assert ("cap", "user", "anna", "month") == tuple(
        told[name] for name in ("name", "of", "value", "per")
    )
    assert ("5.00", "5.00", "CNY") == (told["amount"], told["spent"], told["currency"])
    assert "spend_limit_reached" == body["code"]
    assert int(error.response.headers["retry-after"]) > 0
    assert "0" == error.response.request.headers["x-stainless-retry-count"], "it was not retried"
