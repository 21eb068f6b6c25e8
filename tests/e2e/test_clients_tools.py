"""The default model, which knows no tools, gives valid calls where they are forced."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "book_table",
            "description": "Book a table in a restaurant.",
            "parameters": {
                "type": "object",
                "properties": {
                    "guests": {"type": "integer", "minimum": 1, "maximum": 9},
                    "day": {"enum": ["friday", "saturday"]},
                },
                "required": ["guests", "day"],
            },
        },
    },
    {"type": "function", "function": {"name": "cancel", "parameters": {"type": "object"}}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "A table for four on Friday, please."}]


@pytest.fixture
def client(default_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{default_server}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "book_table"}}]
)
def test_a_forced_call_is_valid(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model="smollm2-135m",
        messages=MESSAGES,
        tools=TOOLS[:1],
        tool_choice=choice,
        temperature=0,
        max_tokens=60,
    )
    [chosen] = answer.choices
    [call] = chosen.message.tool_calls or []
    assert ("tool_calls", "book_table") == (chosen.finish_reason, call.function.name)
    arguments = json.loads(call.function.arguments)
    assert 1 <= arguments["guests"] <= 9
    assert arguments["day"] in ("friday", "saturday")


def test_a_streamed_call_is_the_same(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="smollm2-135m",
        messages=MESSAGES,
        tools=TOOLS[:1],
        tool_choice="required",
        temperature=0,
        max_tokens=60,
    ) as stream:
        final = stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls or []
    assert {"guests", "day"} == set(json.loads(call.function.arguments))


def test_the_result_goes_back_and_the_history_hits(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model="smollm2-135m", messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=60
    )
    message = first.choices[0].message
    [call] = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    second = client.chat.completions.create(
        model="smollm2-135m", messages=[*MESSAGES, message, result], tools=TOOLS, max_tokens=8
    )
    assert second.choices[0].message.content is not None
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 64
