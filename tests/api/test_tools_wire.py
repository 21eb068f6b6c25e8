"""Tools over chat completions: calls parsed from the answer, forced by a grammar, told to the
template; reasoning apart from the text. A call that is forced, in every protocol."""

from typing import Any

import httpx
import pytest

from engine.grammar.compiler import compiler_for
from tests.api.conftest import running
from tests.api.test_chat_wire import CHAT, events
from tests.api.test_structured_wire import RecordingCompiler
from tests.support.models import tiny_model
from tests.support.walks import accepts
from tests.support.wire import ByteTokenizer, Script, byte_model, fake_house

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather somewhere.", "parameters": CITY}
WEATHER: dict[str, Any] = {"type": "function", "function": FUNCTION}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
USER = {"role": "user", "content": "Is it warm in Rome?"}
CALL_OF_TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
CALL_OF_WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALL = f"Let me look.\n{CALL_OF_WEATHER}"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "bytes", "messages": [USER], "tools": [WEATHER, TIME], **fields}


async def test_a_call_is_parsed_from_the_answer(client, house):
    """Without text beside it, the message has no content."""
    for answer, text in ((CALL_OF_WEATHER, None), (CALL, "Let me look.")):
        house.engine.script = Script(answer=answer)
        [choice] = (await client.post(CHAT, json=chat())).json()["choices"]
        assert ("tool_calls", text) == (choice["finish_reason"], choice["message"]["content"])
    [call] = choice["message"]["tool_calls"]
    assert {"name": "weather", "arguments": '{"city": "Rome"}'} == call["function"]
    assert "function" == call["type"]
    assert call["id"].startswith("call_")


async def test_a_streams_arguments_come_in_pieces(client, house):
    house.engine.script = Script(answer=CALL, tokens_per_step=3)
    response = await client.post(CHAT, json=chat(stream=True))
    *chunks, _ = events(response.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert ("weather", "") == (calls[0]["function"]["name"], calls[0]["function"]["arguments"])
    pieces = [call["function"]["arguments"] for call in calls[1:]]
    assert '{"city": "Rome"}' == "".join(pieces)
    assert len(pieces) > 2
    assert {0} == {call["index"] for call in calls}
    assert "Let me look." == "".join(delta.get("content") or "" for delta in deltas)
    assert "tool_calls" == chunks[-1]["choices"][0]["finish_reason"]


async def test_without_tools_the_same_text_is_text(client, house):
    house.engine.script = Script(answer=CALL)
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        [choice] = (await client.post(CHAT, json=chat(**fields))).json()["choices"]
        assert (CALL, "stop") == (choice["message"]["content"], choice["finish_reason"])


async def test_a_turn_that_may_not_call_keeps_the_prefix(client, house):
    """The tools stay in the prompt: it would part at its head from the turns that may call."""
    for choice in ("auto", "none"):
        await client.post(CHAT, json=chat(tool_choice=choice))
    may, may_not = house.engine.requests[-2:]
    assert may.tokens == may_not.tokens
    assert "tools: 2" in ByteTokenizer().decode(may.tokens)


async def test_a_call_that_is_cut_short_ends_by_its_length(client, house):
    house.engine.script = Script(answer=CALL)
    [choice] = (await client.post(CHAT, json=chat(max_tokens=70))).json()["choices"]
    assert "length" == choice["finish_reason"]
    assert "weather" == choice["message"]["tool_calls"][0]["function"]["name"]


async def ask(body: dict[str, Any], answer: str = CALL) -> tuple[httpx.Response, RecordingCompiler]:
    compiler = RecordingCompiler()
    house = fake_house(grammars=compiler)
    house.engine.script = Script(answer=answer)
    async with running(house) as (_, client):
        return await client.post(CHAT, json=body), compiler


STRICT = {"type": "function", "function": FUNCTION | {"strict": True}}
LETTERS = {"type": "object", "properties": {"a": {"enum": ["日", "中"]}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": LETTERS}}


@pytest.mark.parametrize(
    ("fields", "matches", "others"),
    [
        ({"tool_choice": "required"}, [CALL_OF_TIME, CALL_OF_WEATHER], ["x", CALL_OF_TIME * 2]),
        # instructor sends both, by the parse helper of OpenAI's client.
        ({"tool_choice": "required", "response_format": FORM}, [CALL_OF_TIME], ['{"a": "日"}']),
        (
            {"tool_choice": "required", "parallel_tool_calls": True},
            [CALL_OF_TIME, f"{CALL_OF_TIME}\n{CALL_OF_WEATHER}"],
            [CALL_OF_TIME * 2],
        ),
        (
            {"tool_choice": TIME},
            [CALL_OF_TIME],
            [CALL_OF_WEATHER, f"{CALL_OF_TIME}\n{CALL_OF_TIME}"],
        ),
        (
            {"tools": [STRICT]},
            ["", "text <tool", f"Well: {CALL_OF_WEATHER} and {CALL_OF_WEATHER}."],
            [f"Well: {CALL_OF_TIME}", "<tool_call>"],
        ),
        ({"response_format": FORM}, [CALL_OF_TIME, '{"a": "日"}'], ["x", '{"a": "東"}']),
    ],
)
async def test_the_grammar_of_calls_matches_calls(fields, matches, others):
    response, recorded = await ask(chat(**fields))
    assert 200 == response.status_code, response.text
    [source] = recorded.sources
    compiler = compiler_for(tiny_model())
    grammar = compiler.compile(source)
    assert [True] * len(matches) == [accepts(grammar.begin(0), text.encode()) for text in matches]
    assert [False] * len(others) == [accepts(grammar.begin(0), text.encode()) for text in others]
    compiler.close()  # a look that takes long is on its threads


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs.colour"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_an_unsupported_request_is_refused_with_its_field(client, fields, param):
    response = await client.post(CHAT, json=chat(**fields))
    assert (400, param) == (response.status_code, response.json()["error"]["param"])


async def answered(template: str, answer: str, body: dict[str, Any]) -> tuple[Any, Any, str]:
    """The message of the answer under a model of that chat template, its usage, and its prompt."""
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    house = fake_house(models=[byte_model(tokenizer=tokenizer)])
    house.engine.script = Script(answer=answer)
    async with running(house) as (_, client):
        response = await client.post(CHAT, json=body)
        assert 200 == response.status_code, response.text
        prompt = tokenizer.decode(house.engine.requests[0].tokens)
        [choice] = response.json()["choices"]
        return choice["message"], response.json()["usage"], prompt


async def test_a_model_whose_template_knows_no_tools_is_taught_them():
    result = {"role": "tool", "tool_call_id": "c1", "content": "20 degrees"}
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    call = {"id": "c1", "type": "function", "function": function}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    message, _, prompt = await answered("{{ messages }}", CALL, chat(messages=messages))
    assert "weather" == message["tool_calls"][0]["function"]["name"]
    assert prompt.startswith("system: You may call functions")
    assert '"name": "weather", "description": "The weather somewhere."' in prompt
    assert (
        'assistant: <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        "user: <tool_response>\n20 degrees\n</tool_response>\nassistant: "
    ) in prompt


STYLES = {
    "{{ tools }}<|python_tag|>": '{"name": "weather", "parameters": {"city": "Rome"}}',
    "{{ tools }}[TOOL_CALLS]": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]',
    "{% if tools %}<｜tool▁calls▁begin｜>": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "{{ tools }}<|channel|>": (
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
    ),
}


@pytest.mark.parametrize("template", STYLES)
async def test_the_style_is_chosen_from_the_template(template):
    message, _, _ = await answered(template, STYLES[template], chat())
    [call] = message["tool_calls"]
    assert {"name": "weather", "arguments": '{"city": "Rome"}'} == call["function"]
    assert ("[TOOL" in template) == (len(call["id"]) == 9)


async def test_reasoning_is_apart_from_the_text():
    template = "{{ tools }}<tool_call>{{ enable_thinking }}<think></think>"
    body = chat(chat_template_kwargs={"enable_thinking": True})
    message, usage, prompt = await answered(template, f"<think>\nHm.\n</think>\n\n{CALL}", body)
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    assert ("Hm.", "Let me look.") == (message["reasoning_content"], message["content"])
    assert "enable_thinking: True" in prompt


async def test_thinking_is_passed_in_the_templates_own_terms():
    template = "{% if thinking %}<think></think>"
    body = chat(tools=None, thinking={"type": "disabled"})
    _, _, prompt = await answered(template, "x", body)
    assert "thinking: False" in prompt


ANY = {"name": "weather", "input_schema": {"type": "object"}}
NAMED = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
FORCED: dict[str, tuple[dict[str, Any], str]] = {
    CHAT: (chat(tool_choice="required"), "length"),
    "/v1/messages": (chat(max_tokens=100, tools=[ANY], tool_choice={"type": "any"}), "max_tokens"),
    "/v1/responses": (
        {"model": "bytes", "input": "hi", "tools": [NAMED], "tool_choice": "required"},
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
    body, cut = FORCED[url]
    limit = "max_output_tokens" if url == "/v1/responses" else "max_tokens"
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
