"""The official anthropic client against a server on a socket: what it reads and what it raises."""

from typing import Any

import anthropic
import pytest

from billing.errors import InsufficientBalance
from tests.support.wire import Script

MESSAGES: list[Any] = [{"role": "user", "content": "Is it warm in Rome?"}]
PROMPT_TOKENS = len("user: Is it warm in Rome?\nassistant: ")
WEATHER: Any = {
    "name": "weather",
    "description": "The weather somewhere.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def client(server):
    with anthropic.Anthropic(
        base_url=server.url.removesuffix("/v1"), api_key="sk-any", max_retries=0
    ) as client:
        yield client


def test_a_stream_ends_with_the_same_message(server, client):
    server.house.engine.script = Script(answer=CALL, tokens_per_step=4, hits={"hit_host": 3})
    with client.messages.stream(
        model="bytes", max_tokens=200, messages=MESSAGES, tools=[WEATHER]
    ) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    text, call = message.content
    assert ("Let me look.", "weather", {"city": "Rome"}) == (text.text, call.name, call.input)
    assert "tool_use" == message.stop_reason
    told = (message.usage.input_tokens, message.usage.cache_read_input_tokens)
    assert (PROMPT_TOKENS - 3 + len("tools: 1\n"), 3) == told
    assert kinds.count("input_json") > 1


def test_a_call_and_its_result_go_round(server, client):
    server.house.engine.script = Script(answer=CALL)
    asked: dict[str, Any] = {"model": "bytes", "max_tokens": 200, "tools": [WEATHER]}
    first = client.messages.create(messages=MESSAGES, **asked)
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "20 degrees"}
    server.house.engine.script = Script(answer="Yes.")
    turns: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(messages=turns, **asked)
    assert "Yes." == second.content[0].text


def test_refusals_are_the_clients_own_errors(server, client):
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="nobody", max_tokens=5, messages=MESSAGES)
    body: Any = missing.value.body
    assert ("error", "not_found_error") == (body["type"], body["error"]["type"])
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    content: Any = [{"role": "user", "content": [image]}]
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(model="bytes", max_tokens=5, messages=content)
    server.house.meter.refuse = InsufficientBalance(
        "no money", tenant="default", needed=2, available=1, currency="CNY"
    )
    with pytest.raises(anthropic.APIStatusError) as poor:
        client.messages.create(model="bytes", max_tokens=5, messages=MESSAGES)
    assert 402 == poor.value.status_code
