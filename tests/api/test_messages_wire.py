"""Anthropic's Messages as clients send and read them; Claude Code's own request among them."""

import json
from typing import Any

import pytest

from api.errors import MissingKey
from api.shapes.messages import MessagesBody
from billing.keys import Principal, Scope
from tests.api.conftest import of, running
from tests.support.wire import ByteTokenizer, FakeHouse, Script, byte_model, fake_house

MESSAGES = "/v1/messages"
USER = {"role": "user", "content": "hi"}
KEPT = {"type": "ephemeral"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "bytes", "max_tokens": 100, "messages": [USER], **fields}


def block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": [*blocks]}


def sent(house: FakeHouse) -> str:
    return ByteTokenizer().decode(house.engine.requests[-1].tokens)


def kept(house: FakeHouse) -> list[tuple[float, int]]:
    """Of the last request: for how long, and how many tokens."""
    return [(keep.for_s, keep.num_tokens) for keep in house.meter.last.job.keeps]


def events(text: str) -> list[dict[str, Any]]:
    """The data of each event; its name is its type."""
    found = []
    for block in filter(None, text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert f"event: {found[-1]['type']}" == name
    return found


DENIED = [block("text", text="denied")]
CLAUDE_CODE = {
    "system": [
        block("text", text="You are Claude Code.", cache_control=KEPT),
        block("text", text="Be short.", cache_control={**KEPT, "ttl": "1h"}),
    ],
    "messages": [
        turn("user", block("text", text="List the files.")),
        turn(
            "assistant",
            block("thinking", thinking="Use ls.", signature="x"),
            block("tool_use", id="t1", name="Bash", input={"command": "ls"}),
            block("tool_use", id="t2", name="Bash", input={"command": "pwd"}),
        ),
        turn(
            "user",
            block("tool_result", tool_use_id="t1", content="a.txt"),
            block("tool_result", tool_use_id="t2", is_error=True, content=DENIED),
            block("text", text="Go on.", cache_control=KEPT),
        ),
    ],
    "tools": [{"name": "Bash", "description": "Run.", "input_schema": {"type": "object"}}],
    "metadata": {"user_id": "user_1"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}


async def test_claude_codes_request_is_a_chat(client, house):
    house.engine.script = Script(answer="Done.")
    response = await client.post(f"{MESSAGES}?beta=true", json=body(**CLAUDE_CODE))
    assert 200 == response.status_code, response.text
    assert (
        "system: You are Claude Code.\n\nBe short.\nuser: List the files.\nassistant: \n"
        "tool: a.txt\ntool: Error: denied\nuser: Go on.\ntools: 1\nassistant: "
    ) == sent(house)
    first = len("system: You are Claude Code.\n")
    system = len("system: You are Claude Code.\n\nBe short.\nuser: ")  # up to the first turn's text
    whole = len(house.engine.requests[-1].tokens)
    assert [(300, first), (3600, system), (300, whole)] == kept(house)


async def test_a_mark_that_a_later_turn_covers_is_not_kept_for_itself(client, house):
    """Nor is its prompt rendered once more; agents mark their latest two turns."""

    call = turn("assistant", block("tool_use", id="t", name="look", input={}, cache_control=KEPT))
    answered = block("tool_result", tool_use_id="t", content="a.txt", cache_control=KEPT)
    first = block("text", text="hi", cache_control=KEPT)
    asked = body(messages=[turn("user", first), call, turn("user", answered)], max_tokens=5)
    assert 200 == (await client.post(MESSAGES, json=asked)).status_code
    whole = len(house.engine.requests[-1].tokens)
    assert [(300, whole)] == kept(house)
    first["cache_control"] = {**KEPT, "ttl": "1h"}
    asked["messages"].append(USER)
    assert 200 == (await client.post(MESSAGES, json=asked)).status_code
    upto = [len(f"user: {said}") for said in ("hi\n", "hi\nassistant: \ntool: a.txt\n")]
    assert [(3600, upto[0]), (300, upto[1])] == kept(house)


def test_text_that_is_marked_before_a_call_is_kept_without_the_call():
    said = block("text", text="I look.", cache_control=KEPT)
    call = block("tool_use", id="t", name="look", input={})
    result = block("tool_result", tool_use_id="t", content="a.txt")
    asked = body(messages=[USER, turn("assistant", said, call), turn("user", result)])
    chat = MessagesBody.model_validate(asked).as_chat(byte_model())
    [point] = chat.breakpoints()
    cut = chat.until(point)
    assert cut is not None
    assert ["hi", "I look."] == [message.text(0) for message in cut.messages]
    assert (1, None) == (len(chat.messages[1].tool_calls or ()), cut.messages[1].tool_calls)


async def test_the_blocks_of_a_stream_open_and_close_in_turn_and_are_the_whole_answers(
    client, house
):
    """Text, and a call after it."""
    call = '<tool_call>{"name": "look", "arguments": {"q": "x"}}</tool_call>'
    house.engine.script = Script(answer=f"Let me see.\n{call}", hits={"hit_device": 4})
    asked = body(tools=[{"name": "look", "input_schema": {"type": "object"}}])
    found = events((await client.post(MESSAGES, json=asked | {"stream": True})).text)
    told = found[0]["type"], found[0]["message"]["usage"]["cache_read_input_tokens"]
    assert ("message_start", 4) == told
    assert {"stop_reason": "tool_use", "stop_sequence": None} == found[-2]["delta"]
    assert ["message_delta", "message_stop"] == [one["type"] for one in found[-2:]]
    blocks, open_at = list[dict[str, Any]](), None
    for one in (one for one in found if one["type"].startswith("content_block")):
        if one["type"] == "content_block_start":
            assert (None, len(blocks)) == (open_at, one["index"])
            blocks.append(one["content_block"] | {"said": ""})
            open_at = one["index"]
        assert open_at == one["index"]
        if one["type"] == "content_block_delta":
            blocks[open_at]["said"] += one["delta"].get("text") or one["delta"]["partial_json"]
        elif one["type"] == "content_block_stop":
            open_at = None
    assert open_at is None
    text, used = (await client.post(MESSAGES, json=asked)).json()["content"]
    assert [("text", text["text"]), ("tool_use", json.dumps(used["input"]))] == [
        (block["type"], block["said"]) for block in blocks
    ]


async def test_usage_is_the_billed_record_in_anthropics_classes(client, house):
    house.engine.script = Script(answer="x", hits={"hit_device": 4, "hit_disk": 2})
    usage = (await client.post(MESSAGES, json=body())).json()["usage"]
    prompt = len("user: hi\nassistant: ")
    assert {
        "input_tokens": prompt - 6,
        "cache_read_input_tokens": 6,
        "cache_read_input_tokens_details": {"device": 4, "host": 0, "disk": 2},
        "cache_creation_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": 2,
        "service_tier": "standard",
    } == usage


CLEARED = block("clear_tool_uses_20250919")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"model": "no"}, "model"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"tools": [{"name": "w"}]}, "tools[0]"),
        ({"tools": [{"input_schema": {}}]}, "tools[0]"),
        ({"context_management": {"edits": [CLEARED]}}, "context_management.edits"),
        ({"messages": [turn("user", block("image"))]}, "messages[0].content[0]"),
        ({"temperature": 1.5}, "temperature"),
    ],
)
async def test_errors_have_anthropics_shape(client, fields, param):
    kind = "not_found_error" if param == "model" else "invalid_request_error"
    answer = (await client.post(MESSAGES, json=body(**fields))).json()
    assert ("error", kind, param) == (answer["type"], *of(answer["error"], "type", "param"))


async def test_an_engine_failure_has_the_same_error_shape(client, house):
    house.engine.script = Script(answer="one two", fail_after=3)
    whole = await client.post(MESSAGES, json=body())
    assert (500, "api_error") == (whole.status_code, whole.json()["error"]["type"])
    streamed = (await client.post(MESSAGES, json=body(stream=True))).text
    told = json.loads(streamed.rpartition("data: ")[2])  # or the body, where no byte had gone out
    assert ("error", "api_error") == (told["type"], told["error"]["type"])


class OneKey:
    async def identify(self, authorization: str | None) -> Principal:
        if authorization is None:
            raise MissingKey("a key, please")
        assert "Bearer sk-1" == authorization
        return Principal("acme", key_id="k1", scopes=frozenset(Scope))


async def test_x_api_key_names_the_key():
    house = fake_house(gatekeeper=OneKey())
    house.engine.script = Script(answer="x")
    async with running(house) as (_, client):
        good = await client.post(MESSAGES, json=body(), headers={"x-api-key": "sk-1"})
        none = await client.post(MESSAGES, json=body())
        both = {"x-api-key": "sk-1", "Authorization": "Bearer sk-2"}
        two = await client.post(MESSAGES, json=body(), headers=both)
    assert [200, 401, 400] == [good.status_code, none.status_code, two.status_code]
    assert "authentication_error" == none.json()["error"]["type"]
