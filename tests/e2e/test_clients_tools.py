"""The default model, which knows no tools, gives valid calls where they are forced, and the turns
of an agent's conversation hit what the turns before left, by each protocol."""

import json
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

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
def client(default_server):
    with openai.OpenAI(base_url=f"{default_server}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "book_table"}}]
)
def test_a_forced_call_is_valid(client, choice):
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


def test_the_turns_of_an_agent_hit_all_that_was_asked_before(client):
    """Calls and answers take turns; the tools stay in the prompt of both."""
    messages, asked_before = [*MESSAGES], 0
    for choice in ("required", "none", "required", "none"):
        answer: Any = client.chat.completions.create(
            model="smollm2-135m",
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,
            temperature=0,
            max_tokens=60,
            extra_body={"prompt_cache_key": "agent of a test", "cachesvc": {"details": True}},
        )
        message, usage = answer.choices[0].message, answer.usage
        assert (choice == "required") is bool(message.tool_calls)
        assert answer.model_extra["cachesvc"].get("diverged_at_token") is None
        if asked_before:
            assert asked_before <= usage.prompt_cache_hit_tokens < usage.prompt_tokens
        asked_before = usage.prompt_tokens
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
        if choice == "none":
            messages.append({"role": "user", "content": "And one for two on Saturday."})


def test_responses_go_on_from_the_tokens_that_the_last_one_left(client):
    asked: dict[str, Any] = {"model": "smollm2-135m", "temperature": 0, "max_output_tokens": 12}
    first = client.responses.create(input="What is the capital of France?", **asked)
    assert "Paris" in first.output_text
    second = client.responses.create(
        input="And of Italy?", previous_response_id=first.id, stream=True, **asked
    )
    *_, last = second
    assert ("response.completed", "response.incomplete").count(last.type) == 1
    stood = first.usage.input_tokens + first.usage.output_tokens - 1
    assert stood <= last.response.usage.input_tokens_details.cached_tokens
