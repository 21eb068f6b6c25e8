"""OpenAI's Responses as clients send them; codex's own request among them."""

import json
from typing import Any

import pytest

from api.requests.responses import KeptResponse, StoredResponses
from api.shapes.responses import ResponsesBody
from tests.api.conftest import running
from tests.support.wire import ByteTokenizer, FakeHouse, Script, byte_model, fake_house

RESPONSES = "/v1/responses"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "bytes", "input": "hi", **fields}


def sent(house: FakeHouse) -> str:
    return ByteTokenizer().decode(house.engine.requests[-1].tokens)


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


THOUGHT = {"type": "reasoning_text", "text": "Use ls."}
CODEX: dict[str, Any] = {
    "instructions": "You are Codex.",
    "input": [
        said("developer", "Sandboxed."),
        said("user", "List files."),
        {"type": "reasoning", "summary": [], "content": [THOUGHT], "encrypted_content": None},
        {"type": "function_call", "name": "shell", "arguments": '{"a":1}', "call_id": "c1"},
        {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
        {"type": "function_call_output", "call_id": "c2", "output": "b.txt"},
    ],
    "tools": [{"type": "function", "name": "shell", "strict": False, "parameters": {}}],
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
}
CODEX |= {"tool_choice": "auto", "parallel_tool_calls": False, "store": False, "stream": True}
CODEX |= {"prompt_cache_key": "session-1", "client_metadata": {"x": "y"}}
SPAWN = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [
        {"type": "function", "name": "spawn", "description": "Start one.", "parameters": {}},
        {"type": "function", "name": "wait", "parameters": {}},
    ],
}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_namespace_s_function_names_it(client, house, *, stream):
    """codex groups functions, and knows a call by its namespace and its name."""
    house.engine.script = Script(answer='<tool_call>{"name": "wait", "arguments": {}}</tool_call>')
    tools = [*CODEX["tools"], SPAWN]
    answer = await client.post(RESPONSES, json=body(tools=tools, stream=stream))
    last = answer.text.rpartition("data: ")[2]
    told = json.loads(last)["response"] if stream else answer.json()
    [call] = told["output"]
    assert ("agents", "wait") == (call["namespace"], call["name"])
    again = [*CODEX["input"][:2], call, {**CODEX["input"][5], "call_id": call["call_id"]}]
    answer = await client.post(RESPONSES, json=body(input=again, tools=tools))
    assert 200 == answer.status_code, answer.text


async def test_a_namespace_describes_its_functions_to_the_model():
    functions = ResponsesBody(model="bytes", input="hi", tools=[SPAWN]).as_chat([]).tools
    assert functions is not None
    assert ["agents: Sub-agents.\nStart one.", None] == [
        tool.function.description for tool in functions
    ]


async def test_codexs_request_is_a_chat(client, house):
    house.engine.script = Script(answer="Done.")
    response = await client.post(RESPONSES, json=body(**CODEX))
    assert 200 == response.status_code, response.text
    assert (
        "system: You are Codex.\n\nSandboxed.\nuser: List files.\nassistant: \ntool: a.txt\n"
        "tool: b.txt\ntools: 1\nassistant: "
    ) == sent(house)
    assert "[DONE]" not in response.text


async def test_unknown_fields_are_not_stored(client):
    """Unknown fields are never read, so they would be free storage, sent back in each event."""
    junk = {"junk": "x" * 100_000}
    spoken = {"type": "message", "role": "user", "id": "m1", "status": "completed"}
    part = {"type": "input_text", "text": "hi"}
    function = {"type": "function", "name": "f", "description": "d", "parameters": {"a": 1}}
    group = {"type": "namespace", "name": "g", "tools": [{**function, "name": "h"}]}
    asked = body(
        input=[{**spoken, "content": [part | junk], "call_id": "x" * 513, **junk}],
        tools=[function | junk, group | junk | {"tools": [group["tools"][0] | junk]}],
        text={"format": {"type": "text"} | junk},
    )
    answer = await client.post(RESPONSES, json=asked)
    assert 200 == answer.status_code, answer.text
    items = await client.get(f"{RESPONSES}/{answer.json()['id']}/input_items")
    assert (404, "not_served") == (items.status_code, items.json()["error"]["code"])
    assert [function, group] == answer.json()["tools"]
    assert "junk" not in answer.text
    chosen = {"type": "function", "name": "f"}
    named = ResponsesBody(model="bytes", tool_choice=chosen | junk)
    assert chosen == named.shown_choice()


async def test_reasoning_is_an_item_of_its_own():
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "<think></think>"
    house = fake_house(models=[byte_model(tokenizer=tokenizer)])
    house.engine.script = Script(answer="<think>Hm.</think>Yes.")
    async with running(house) as (_, client):
        answer = (await client.post(RESPONSES, json=body())).json()
    thought, message = answer["output"]
    assert ("reasoning", "Hm.") == (thought["type"], thought["content"][0]["text"])
    assert "Yes." == message["content"][0]["text"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
@pytest.mark.parametrize("fail_after", [None, 3])
async def test_events_are_numbered_in_the_order_of_the_wire(
    client, house, tokens_per_step, fail_after
):
    """However many tokens a write carries, and in a stream that fails."""
    house.engine.script = Script(
        answer="one two", fail_after=fail_after, tokens_per_step=tokens_per_step, step_s=0.01
    )
    response = await client.post(RESPONSES, json=body(stream=True))
    text = response.text
    fails = fail_after is not None and tokens_per_step < 1000
    if fails and response.status_code == 200:  # 500 on a machine that stalls: nothing had gone out
        assert "event: response.failed" in text
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    numbers = [json.loads(each)["sequence_number"] for each in data]
    assert list(range(len(numbers))) == numbers, text


async def test_the_oldest_response_makes_room():
    stored = StoredResponses(max_bytes=300)
    for number in range(5):
        stored.put(b"a", f"r{number}", KeptResponse({"id": f"r{number}", "text": "x" * 80}, []))
    assert stored.num_bytes <= 300
    assert await stored.get(b"a", "r0") is None
    assert await stored.get(b"a", "r4") is not None
    assert await stored.get(b"b", "r4") is None
