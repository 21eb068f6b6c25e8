"""Every content block of Anthropic's clients: rendered, given a short text in its place, or refused
by type and place. Also a last message of the assistant, which is continued."""

from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types.beta import beta_content_block_param
from transformers import AutoTokenizer
from typing_extensions import is_typeddict

from api.shapes.blocks import KINDS
from engine.text.tokenizer import Tokenizer
from tests.api.conftest import running
from tests.api.real_service import served
from tests.api.test_messages_wire import MESSAGES, block, body, sent, turn
from tests.api.test_steering_real import tiny
from tests.support.wire import ByteTokenizer, Script, byte_model, fake_house

HI, GO_ON = {"role": "user", "content": "hi"}, {"role": "user", "content": "go on"}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}
PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
# Refused by name: they change the tools from one turn to the next.
REFUSED = {"tool_addition", "tool_removal"}


def used(kind, **fields):
    return block(kind, id="s1", name="look", input={"q": "x"}) | fields


def ran(kind, content):
    return block(kind, tool_use_id="s1", content=content)


def document(source, **fields):
    return block("document", source=source, **fields)


IMAGE, LAW = block("image", source=PNG), block("text", data="law")
SOUGHT = block("search_result", source="a.example", title="A")
SOUGHT["content"] = [block("text", text="found")]
# A block, and its text in a prompt; None for a user's block that only history may hold.
OF_USER: list[tuple[dict[str, Any], str]] = [
    (IMAGE, "[image not shown]"),
    (block("image", source=block("file", file_id="f")), "[image not shown]"),
    (document(LAW, title="Laws", context="old"), "Laws\nold\nlaw"),
    (document(block("content", content="law")), "law"),
    (document(block("content", content=[block("text", text="law")])), "law"),
    (document(PDF, title="Laws"), "Laws\n[document not shown]"),
    (document({"type": "url", "url": "http://a"}), "[document not shown]"),
    (SOUGHT, "A\na.example\nfound"),
    ({"type": "container_upload", "file_id": "f1"}, "[file f1 not shown]"),
]
SEARCHED = block("web_search_result", title="T", url="u", encrypted_content="x")
MANY = block("web_search_tool_result_error", error_code="many")
FETCHED = block("web_fetch_result", url="u", content=document(PDF))
MADE = [block("bash_code_execution_output", file_id="f")]
OUTPUT = block("bash_code_execution_result", stdout="out", stderr="", return_code=0, content=MADE)
NAMED = [block("tool_reference", tool_name="t")]
FOUND = block("tool_search_tool_search_result", tool_references=NAMED)
OF_ASSISTANT: list[tuple[dict[str, Any], str]] = [
    (used("server_tool_use"), '[called look {"q":"x"}]'),
    (used("mcp_tool_use", server_name="s"), '[called look {"q":"x"}]'),
    (ran("mcp_tool_result", [block("text", text="told")]), "told"),
    (ran("web_search_tool_result", [SEARCHED]), "T\nu"),
    (ran("web_search_tool_result", MANY), "[error many]"),
    (ran("web_fetch_tool_result", FETCHED), "u\n[document not shown]"),
    (ran("bash_code_execution_tool_result", OUTPUT), "out\n[file f]"),
    (ran("tool_search_tool_result", FOUND), "[tool t]"),
    (block("compaction", content="so far"), "so far"),
    (block("compaction", content=None), ""),
    (block("redacted_thinking", data="x"), ""),
]
OF_RESULT: list[tuple[Any, str]] = [
    ("words", "words"),
    (IMAGE, "[image not shown]"),
    (document(LAW), "law"),
    (SOUGHT, "A\na.example\nfound"),
    ({"type": "tool_reference", "tool_name": "t"}, "[tool t]"),
]


def result(*content):
    return {"type": "tool_result", "tool_use_id": "t1", "content": list(content)}


CALL, SEE = block("tool_use", id="t1", name="f", input={}), block("text", text="see:")


OTHER_FIELDS = {"cache_control", "citations", "caller", "state_changes", "tool", "input_schema"}


def types_of(hint, seen):
    """The types of all blocks that a type of the client names, at any depth."""
    if not is_typeddict(hint):
        for inner in get_args(hint):
            yield from types_of(inner, seen)
    elif hint not in seen:
        seen.add(hint)
        fields = get_type_hints(hint, include_extras=True)
        yield from get_args(get_type_hints(hint).get("type"))
        for name in fields.keys() - OTHER_FIELDS:
            yield from types_of(fields[name], seen)


def test_every_block_of_the_client_is_in_the_table():
    """A new version of the client shows its new blocks here."""
    theirs = set(types_of(beta_content_block_param.BetaContentBlockParam, set()))
    of_fields = {"base64", "url", "file", "content"}  # the sources of documents
    errors = {kind for kind in theirs if kind.endswith("_tool_result_error")}
    assert set() == theirs - KINDS.keys() - REFUSED - of_fields - errors
    assert len(theirs) > 40


async def answered(client, house, messages):
    answer = await client.post(MESSAGES, json=body(messages=messages))
    assert 200 == answer.status_code, answer.text
    return sent(house)


@pytest.mark.parametrize(("block", "text"), OF_USER)
async def test_a_users_block_in_history(client, house, block, text):
    """What no model sees is refused by type and place while it is new, and never again."""
    asked = turn("user", SEE, block)
    said = {"role": "assistant", "content": "ok"}
    prompt = await answered(client, house, [asked, said, GO_ON])
    assert f"user: see:\n\n{text}\nassistant: ok\n" in prompt
    for newest in ([asked], [asked, GO_ON], [HI, said, asked], [asked, said]):
        answer = await client.post(MESSAGES, json=body(messages=newest))
        if "not shown" in text:
            place = f"messages[{newest.index(asked)}].content[1]"
            told = answer.json()["error"]
            assert answer.status_code == 400 and told["param"].startswith(place)
            assert f"'{block['type']}'" in told["message"] or "source" in told["param"]
        else:
            assert 200 == answer.status_code, answer.text


@pytest.mark.parametrize(("block", "text"), OF_ASSISTANT)
async def test_an_assistants_block_in_history(client, house, block, text):
    told = f"see:\n\n{text}" if text else "see:"
    prompt = await answered(client, house, [HI, turn("assistant", SEE, block), GO_ON])
    assert f"assistant: {told}\nuser: go on\n" in prompt


@pytest.mark.parametrize(("block", "text"), OF_RESULT)
async def test_a_block_of_a_tools_result(client, house, block, text):
    turns = [HI, turn("assistant", CALL), turn("user", result("see:", block))]
    said = {"role": "assistant", "content": "ok"}
    assert f"tool: see:\n\n{text}\n" in await answered(client, house, [*turns, said, GO_ON])
    answer = await client.post(MESSAGES, json=body(messages=turns))
    assert (400 if "not shown" in text else 200) == answer.status_code
    if answer.status_code == 400:
        assert "messages[2].content[0].content[1]" == answer.json()["error"]["param"]


@pytest.mark.parametrize(
    ("role", "block", "place"),
    [
        *((role, {"type": "hologram"}, "") for role in ("user", "assistant", "system")),
        ("user", used("tool_use"), ""),
        ("user", {"type": "web_search_result", "title": "t"}, ""),
        ("assistant", IMAGE, ""),
        ("assistant", result("x"), ""),
        ("system", IMAGE, ""),
        ("system", {"type": "tool_addition", "tool": {}}, ""),
        ("user", result({"type": "hologram"}), ".content[0]"),
        ("user", result(result("x")), ".content[0]"),
        ("user", document({"type": "hologram"}), ".source"),
        ("user", document(block("content", content=[used("tool_use")])), ".source.content[0]"),
        ("assistant", ran("web_search_tool_result", [{"type": "hologram"}]), ".content[0]"),
        ("user", {"type": "text"}, ".text"),
        ("user", result(5), ".content[0]"),
        ("user", {"type": "search_result", "content": 5}, ".content"),
    ],
)
async def test_a_block_that_is_not_known_there_is_refused_by_type_and_place(
    client, role, block, place
):
    """In the oldest turn as in the newest."""
    asked = body(messages=[HI, turn(role, SEE, block), GO_ON])
    answer = await client.post(MESSAGES, json=asked)
    told = answer.json()["error"]
    assert (400, f"messages[1].content[1]{place}") == (answer.status_code, told["param"])
    if '"hologram"' in str(block).replace("'", '"'):
        assert "'hologram'" in told["message"]


async def test_a_block_without_end_is_refused(client):
    deep = "x"
    for _ in range(400):
        deep = [deep]
    for one in ({"type": "search_result", "content": deep}, used("server_tool_use", input=deep)):
        said = turn("assistant" if "input" in one else "user", one)
        answer = await client.post(MESSAGES, json=body(messages=[HI, said, GO_ON]))
        told = answer.status_code, answer.json()["error"]["param"]
        assert (400, "messages[1].content[0]") == told


async def test_system_messages_in_the_middle(client, house):
    steer = {"role": "system", "content": [block("text", text="French.")], "clear_at": "never"}
    said = {"role": "assistant", "content": "ok"}
    for turns in ([HI, steer], [HI, said, steer, GO_ON], [HI, said, GO_ON, steer], [steer, HI]):
        assert "system: French.\n" in await answered(client, house, turns)


async def test_a_marked_part_of_history_is_kept_with_what_nobody_sees(client, house):
    """Where the chat is cut, the last turn is not its newest."""
    marked = turn("user", IMAGE | {"cache_control": {"type": "ephemeral"}})
    prompt = await answered(client, house, [marked, {"role": "assistant", "content": "ok"}, GO_ON])
    [keep] = house.meter.last.job.keeps
    assert "user: [image not shown]" == prompt[: keep.num_tokens].rstrip()


async def test_tools_of_others_are_skipped_by_name(client, house):
    own = {"name": "mine", "input_schema": {"type": "object"}, "defer_loading": True}
    others = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
    ]
    cited = turn("user", document(LAW, citations={"enabled": True}))
    asked = body(tools=[own, *others], messages=[cited])
    answer = await client.post(MESSAGES, json=asked)
    assert 200 == answer.status_code, answer.text
    named = "messages.citations tools.bash tools.defer_loading tools.mcp_toolset tools.web_search"
    assert named.split() == answer.headers["x-cachesvc-ignored"].split(", ")
    assert "tools: 1\n" in sent(house)
    forced = await client.post(MESSAGES, json=body(tools=others, tool_choice={"type": "any"}))
    assert (400, "tool_choice") == (forced.status_code, forced.json()["error"]["param"])


async def test_an_overflow_is_worded_as_agents_look_for_it():
    house = fake_house(models=[byte_model(max_context=100)])
    async with running(house) as (_, client):
        for text, limit, told in (
            ("x" * 82, 1, "prompt is too long: 100 tokens > 99 maximum"),
            ("x" * 8000, 1, "prompt is too long: 2001 tokens > 99 maximum"),
            ("x" * 20, 70, "input length and `max_tokens` exceed context limit: 38 + 70 > 100"),
        ):
            asked = body(messages=[{"role": "user", "content": text}], max_tokens=limit)
            answer = await client.post(MESSAGES, json=asked)
            assert 400 == answer.status_code
            assert answer.json()["error"]["message"].startswith(told)


BEGUN = {"role": "assistant", "content": "Once"}
BEGUN_IN_PARTS = turn("assistant", block("text", text="Once"))


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (MESSAGES, {"messages": [HI, BEGUN], "max_tokens": 50}),
        (MESSAGES, {"messages": [HI, BEGUN_IN_PARTS], "max_tokens": 50}),
        ("/v1/responses", {"input": [HI, BEGUN]}),
        ("/v1/chat/completions", {"messages": [HI, BEGUN | {"prefix": True}]}),
        ("/v1/chat/completions", {"messages": [HI, BEGUN | {"partial": True}]}),
        ("/v1/chat/completions", {"messages": [HI, BEGUN], "continue_final_message": True}),
    ],
)
async def test_a_last_message_of_the_assistant_is_continued(client, house, path, asked):
    house.engine.script = Script(answer=" upon a time.")
    answer = await client.post(path, json={"model": "bytes", **asked})
    assert (200, "user: hi\nassistant: Once") == (answer.status_code, sent(house))
    assert '" upon a time."' in answer.text and "Once" not in answer.text
    if path == MESSAGES:
        counted = await client.post(f"{MESSAGES}/count_tokens", json={"model": "bytes", **asked})
        assert len(sent(house)) == counted.json()["input_tokens"]


TOOL = {"name": "f", "input_schema": {"type": "object"}}
THOUGHT, FORM = block("thinking", thinking="a"), block("json_schema", schema={})
CALLED = block("function_call", name="f", call_id="c", arguments="{}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [HI, turn("assistant", CALL)]}, "messages"),
        ({"messages": [HI, {**BEGUN, "content": [THOUGHT]}]}, "messages"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"output_config": {"format": FORM}}, "output_config.format"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ],
)
async def test_what_cannot_go_on_is_refused_by_name(fields, param):
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "{{ tools }} <tool_call> {{ enable_thinking }} </think>"
    house = fake_house(models=[byte_model(tokenizer=tokenizer)])
    async with running(house) as (_, client):
        asked = body(**{"messages": [HI, BEGUN], **fields})
        answer = await client.post(MESSAGES, json=asked)
        assert (400, param) == (answer.status_code, answer.json()["error"]["param"])
        if "messages" not in fields:
            assert answer.status_code == 400
            asked["messages"] = [HI, {**BEGUN, "content": ""}]  # an empty one begins an answer
            if param == "thinking":
                assert 200 == (await client.post(MESSAGES, json=asked)).status_code
                assert sent(house).endswith("assistant: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [HI, CALLED]}, "input"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"tools": [{"type": "function", "name": "f"}], "tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_nor_in_responses(client, fields, param):
    asked = {"model": "bytes", "input": [HI, BEGUN], **fields}
    answer = await client.post("/v1/responses", json=asked)
    assert (400, param) == (answer.status_code, answer.json()["error"]["param"])


async def test_a_stored_response_is_one_message_with_what_it_continued(client, house):
    house.engine.script = Script(answer=" upon a time.")
    asked = {"model": "bytes", "input": [HI, BEGUN], "max_output_tokens": 5}
    first = (await client.post("/v1/responses", json=asked)).json()
    assert "incomplete" == first["status"]
    more = {"model": "bytes", "previous_response_id": first["id"]}
    second = (await client.post("/v1/responses", json=more)).json()
    assert "user: hi\nassistant: Once upon" == sent(house).rstrip()
    more |= {"previous_response_id": second["id"], "input": "go on"}
    await client.post("/v1/responses", json=more)
    assert "user: hi\nassistant: Once upon upon a time.\nuser: go on\nassistant: " == sent(house)


@pytest.mark.timeout(120)
async def test_a_continued_turn_hits_like_any_other(tmp_path):
    """Over the real engine. Its prompt is the template's, without the end of the last message."""
    folder = tiny(tmp_path, "llama3")
    async with served(tmp_path / "data", folder) as (_, client):
        asks = {"role": "user", "content": "A question. " * 20}
        begun = {"role": "assistant", "content": "An answer that has begun, at length"}

        async def usage(path, messages, **more):
            asked = {"model": str(folder), "messages": messages, **more}
            answer = await client.post(path, json=asked)
            assert 200 == answer.status_code, answer.text
            told = answer.json()
            return told.get("usage", told)

        tokenizer = Tokenizer(AutoTokenizer.from_pretrained(folder))
        shown = tokenizer.render([asks, begun], continue_final_message=True)
        prompt = tokenizer.encode(shown, add_special_tokens=False)
        assert tokenizer.decode(prompt).endswith(begun["content"])
        counted = await usage(f"{MESSAGES}/count_tokens", [asks, begun])
        assert len(prompt) == counted["input_tokens"]
        first = await usage(MESSAGES, [asks, begun], max_tokens=4)
        again = await usage(MESSAGES, [asks, begun], max_tokens=4)
        read, written = "cache_read_input_tokens", "cache_creation_input_tokens"
        assert len(prompt) == first["input_tokens"] + first[read] + first[written]
        assert (0, len(prompt) - 1) == (first[read], again[read])
        whole = await usage(MESSAGES, [asks], max_tokens=4)
        assert whole[read] >= len(asks["content"])
