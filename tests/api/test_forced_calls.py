"""A call that tool_choice forces, in every protocol: only its length cuts it."""

from typing import Any

import pytest

from tests.api.conftest import running
from tests.api.test_chat_wire import CHAT
from tests.api.test_structured_wire import RecordingCompiler
from tests.api.test_tools_wire import CALL_OF_WEATHER, USER, chat
from tests.support.wire import Script, fake_house

SCHEMA = {"type": "object"}
FORCED: dict[str, tuple[str, dict[str, Any], str]] = {
    CHAT: ("max_tokens", chat(tool_choice="required"), "length"),
    "/v1/messages": (
        "max_tokens",
        {
            "model": "bytes",
            "max_tokens": 100,
            "messages": [USER],
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
        "max_tokens",
    ),
    "/v1/responses": (
        "max_output_tokens",
        {
            "model": "bytes",
            "input": "hi",
            "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
            "tool_choice": "required",
        },
        "incomplete",
    ),
}


def told(answer: dict[str, Any]) -> tuple[str, str, list[Any]]:
    """Why an answer of any protocol ended, its text, and its calls' arguments."""
    if "choices" in answer:
        [choice] = answer["choices"]
        calls = choice["message"].get("tool_calls") or ()
        arguments = [call["function"]["arguments"] for call in calls]
        return choice["finish_reason"], choice["message"]["content"] or "", arguments
    items = answer["content"] if "content" in answer else answer["output"]
    assert {answer.get("status")} >= {item.get("status") for item in items}
    texts = [str(item.get("text", item)) for item in items if "name" not in item]
    given = [item.get("input", item.get("arguments")) for item in items if "name" in item]
    return answer.get("stop_reason") or answer["status"], "".join(texts), given


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        (CHAT, {"stop": ["}"]}),
        (CHAT, {"stop": ["\n"]}),
        (CHAT, {"stop_token_ids": [ord("}"), ord("\n")]}),
        ("/v1/messages", {"stop_sequences": ["}", "\n"]}),
        ("/v1/responses", {}),
    ],
)
async def test_only_the_length_cuts_a_forced_call(url, fields):
    """A part of one is neither text nor a finished call."""
    limit, body, cut = FORCED[url]
    house = fake_house(grammars=RecordingCompiler())
    house.engine.script = Script(answer=CALL_OF_WEATHER)
    async with running(house) as (_, client):
        whole = told((await client.post(url, json=body | fields)).json())
        assert () == house.engine.requests[-1].params.stop_token_ids
        arguments = {"city": "Rome"} if url == "/v1/messages" else '{"city": "Rome"}'
        ended = {CHAT: "tool_calls", "/v1/messages": "tool_use"}.get(url, "completed")
        assert (ended, "", [arguments]) == whole
        for most in (1, 11, 12, 25, 45, 55, 61, 65, 75):
            asked = body | fields | {limit: most}
            reason, text, _ = told((await client.post(url, json=asked)).json())
            assert (cut, "") == (reason, text), most
            streamed = await client.post(url, json=asked | {"stream": True})
            assert "tool_call>" not in streamed.text
            assert cut in streamed.text
