"""Every field that a provider documents is honoured, refused, or ignored on purpose."""

from typing import Any, get_args, get_type_hints

import openai.types.chat.completion_create_params as openai_chat
import openai.types.completion_create_params as openai_text
import openai.types.responses.response_create_params as openai_responses
import pytest
from anthropic.types import message_create_params as anthropic_messages
from anthropic.types.beta import message_create_params as anthropic_beta
from pydantic import BaseModel
from typing_extensions import is_typeddict

from tests.support.protocols import PROTOCOLS, Handling
from tests.support.wire import ByteTokenizer, Script

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    "/v1/completions": {"model": "bytes", "prompt": "hi"},
    "/v1/responses": {"model": "bytes", "input": "hi"},
    "/v1/messages": HELLO | {"max_tokens": 5},
}

# api-docs.deepseek.com, "Create Chat Completion" and "Rate Limit & Isolation", 2026
DEEPSEEK = """
    messages model thinking reasoning_effort frequency_penalty max_tokens presence_penalty
    response_format stop stream stream_options temperature top_p tools tool_choice logprobs
    top_logprobs user_id
""".split()  # noqa: SIM905  a list of words
# alibabacloud.com, Model Studio, "OpenAI Chat", 2026
QWEN = """
    model messages stream stream_options modalities audio temperature top_p top_k
    presence_penalty response_format max_tokens max_completion_tokens vl_high_resolution_images
    n enable_thinking preserve_thinking thinking_budget enable_code_interpreter seed logprobs
    top_logprobs stop tools tool_choice parallel_tool_calls enable_search search_options skill
    tool_stream max_input_tokens asr_options translation_options
""".split()  # noqa: SIM905  a list of words
TYPED = [
    (CHAT, openai_chat.CompletionCreateParamsStreaming),
    ("/v1/completions", openai_text.CompletionCreateParamsStreaming),
    ("/v1/responses", openai_responses.ResponseCreateParamsStreaming),
    ("/v1/messages", anthropic_messages.MessageCreateParamsStreaming),
    ("/v1/messages", anthropic_beta.MessageCreateParamsStreaming),
]
PROVIDERS = [(CHAT, DEEPSEEK), (CHAT, QWEN)]
PROVIDERS += [(path, [*params.__annotations__]) for path, params in TYPED]
# Fields of objects within a body that the clients name and that change nothing here.
UNREAD: dict[str, dict[str, set[str]]] = {
    "/v1/chat/completions": {
        "response_format.json_schema": {"description"},  # the schema says all
        "stream_options": {"include_obfuscation"},
    },
    # The template decides what is rendered of earlier reasoning, and summaries are not made.
    "/v1/responses": {"reasoning": {"context", "generate_summary", "mode"}},
    "/v1/completions": {"stream_options": {"include_obfuscation"}},
}
# Objects of many kinds, whose own translations refuse the kinds that they do not know.
OF_MANY_KINDS = {"content", "input", "tools", "tool_choice", "system"}


def kinds_within(hint):
    """The typed dictionaries and models that a type mentions."""
    if is_typeddict(hint) or (isinstance(hint, type) and issubclass(hint, BaseModel)):
        yield hint
    for inner in get_args(hint):
        yield from kinds_within(inner)


def unread(theirs, ours, path=""):
    """The fields of nested objects that a client's types name and our models do not, by path."""
    named = {}
    for kind in theirs:
        for name, hint in get_type_hints(kind, include_extras=True).items():
            named.setdefault(name, []).extend(kinds_within(hint))
    known = {}
    for model in ours:
        for name, field in model.model_fields.items():
            known.setdefault(field.alias or name, []).extend(kinds_within(field.annotation))
    if path and set(named) - set(known):
        yield path.removeprefix("."), set(named) - set(known)
    for name in sorted((set(named) & set(known)) - OF_MANY_KINDS):
        if named[name] and known[name]:
            yield from unread(named[name], known[name], f"{path}.{name}")


@pytest.mark.parametrize(("path", "names"), PROVIDERS)
def test_every_field_of_a_provider_is_in_the_table(path, names):
    (protocol,) = (each for each in PROTOCOLS if each.path == path)
    known = {name for name, _, _ in protocol.fields()}
    assert set() == set(names) - known


@pytest.mark.parametrize(("path", "params"), TYPED)
def test_every_field_of_an_object_within_is_read_or_known_to_change_nothing(path, params):
    (protocol,) = (each for each in PROTOCOLS if each.path == path)
    for where, names in unread([params], [protocol.body]):
        assert set() == names - UNREAD.get(path, {}).get(where, set()), where


async def test_an_assistants_refusal_is_its_text_and_old_calls_are_refused(client, house):
    refused = {"type": "refusal", "refusal": "No."}
    user = HELLO["messages"]
    for said in ({"content": None, "refusal": "No."}, {"content": [refused]}):
        asked = [*user, {"role": "assistant", **said}, *user]
        assert 200 == (await client.post(CHAT, json=HELLO | {"messages": asked})).status_code
        assert "assistant: No.\n" in ByteTokenizer().decode(house.engine.requests[-1].tokens)
    theirs = [{"role": "user", "content": [refused]}]
    answer = await client.post(CHAT, json=HELLO | {"messages": theirs})
    assert (400, "messages[0].content[0]") == (answer.status_code, answer.json()["error"]["param"])
    named = {"role": "user", "content": "hi", "clear_at": "2026-11-23T00:00:00Z"}
    answer = await client.post("/v1/messages", json=BODIES["/v1/messages"] | {"messages": [named]})
    assert (400, True) == (answer.status_code, "clear_at" in answer.json()["error"]["param"])
    for name, value in (("function_call", {"name": "f"}), ("audio", {"id": "a"})):
        asked[1] = {"role": "assistant", "content": None, name: value}
        answer = await client.post(CHAT, json=HELLO | {"messages": asked})
        told = answer.json()["error"]
        assert (400, f"messages[1].{name}") == (answer.status_code, told["param"])


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda each: each.path)
async def test_the_table_is_what_the_routes_do(client, protocol):
    """A refused field is refused by name; an ignored one is named in the header, and no other."""
    body = BODIES[protocol.path]
    for name, handling, why in protocol.fields():
        if handling is Handling.HONOURED:
            continue
        answer = await client.post(protocol.path, json=body | {name: {"x": 1}})
        if handling is Handling.REFUSED:
            assert 400 == answer.status_code, name
            error = answer.json()["error"]
            assert ("unsupported_parameter", name) == (error.get("code"), error["param"])
            assert f"{name} is not served; {why}." == error["message"]
        else:
            assert (200, name) == (answer.status_code, answer.headers["x-cachesvc-ignored"])
    answer = await client.post(protocol.path, json=body | {"no_such_field": 1, "a b\n": 2})
    assert (200, "no_such_field") == (answer.status_code, answer.headers["x-cachesvc-ignored"])
    assert "x-cachesvc-ignored" not in (await client.post(protocol.path, json=body)).headers


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda each: each.path)
async def test_values_that_change_nothing_are_served(client, protocol):
    for name, field in protocol.refused.items():
        for value in (None, *field.neutral):
            answer = await client.post(protocol.path, json=BODIES[protocol.path] | {name: value})
            assert 200 == answer.status_code, (name, value, answer.text)


async def test_what_has_no_effect_is_named(client, house):
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = HELLO | {"store": True, "stream": True, "stream_options": options}
    answer = await client.post(CHAT, json=asked)
    named = answer.headers["x-cachesvc-ignored"].split(", ")
    assert (200, ["store", "stream_options.continuous_usage_stats"]) == (answer.status_code, named)


async def test_a_salt_or_an_end_user_keeps_blocks_apart(client, house):
    """They name a content of the first token, so equal prompts have other keys."""

    async def named(path=CHAT, **fields):
        answer = await client.post(path, json=BODIES[path] | fields)
        assert 200 == answer.status_code, answer.text
        request = house.engine.requests[-1]
        assert all((0, 1) == (each.start, each.length) for each in request.contents)
        return request.scope, tuple(each.digest for each in request.contents)

    for path in BODIES:
        plain = await named(path)
        salted = await named(path, cache_salt="a")
        assert salted == await named(path, cache_salt="a")
        assert plain == await named(path, cache_salt="")
        assert 3 == len({plain, salted, await named(path, cache_salt="b")})
    for path in (CHAT, "/v1/completions"):
        plain = await named(path)
        different = {
            plain,
            await named(path, cache_salt="a"),
            await named(path, cache_salt="b"),
            await named(path, user_id="a"),
            await named(path, user_id="a", cache_salt="b"),
        }
        assert 5 == len(different)
        assert plain == await named(path, user="a", safety_identifier="b", cache_salt="")


async def test_a_salt_that_cannot_be_honoured_is_refused(client):
    contents = {"contents": [{"start": 0, "length": 1, "digest": "00" * 16}]}
    answer = await client.post(CHAT, json=HELLO | {"cachesvc": contents})
    assert (400, "cachesvc") == (answer.status_code, answer.json()["error"]["param"])
    assert "an engine at a URL that reads it" in answer.json()["error"]["message"]
    for path in BODIES:
        answer = await client.post(path, json=BODIES[path] | {"cache_salt": "a" * 1025})
        assert (400, "cache_salt") == (answer.status_code, answer.json()["error"]["param"])
    answer = await client.post(CHAT, json=HELLO | {"user_id": "a b"})
    assert (400, "user_id") == (answer.status_code, answer.json()["error"]["param"])


async def test_the_service_tier_is_answered(client):
    """The card of these tests has no tier of that name."""
    for path, body in BODIES.items():
        told = (await client.post(path, json=body | {"service_tier": "flex"})).json()
        own = told["usage"]["service_tier"] if path == "/v1/messages" else told["service_tier"]
        assert ("standard" if path == "/v1/messages" else "default") == own


async def test_writes_and_marked_tokens_are_in_every_usage(client, house):
    house.engine.script = Script(answer="x", hits={"hit_device": 1})
    for path, name in (
        (CHAT, "prompt_tokens_details"),
        ("/v1/completions", "prompt_tokens_details"),
        ("/v1/responses", "input_tokens_details"),
    ):
        usage = (await client.post(path, json=BODIES[path])).json()["usage"]
        details = usage[name]
        assert {"cached_tokens", "cache_write_tokens", "cached_tokens_details"} == details.keys()
        assert 1 == details["cached_tokens"] == details["cached_tokens_details"]["device"]
    usage = (await client.post("/v1/messages", json=BODIES["/v1/messages"])).json()["usage"]
    assert 1 == usage["cache_read_input_tokens_details"]["device"]


def part(text, **mark):
    return {"type": "text", "text": text, **mark}


BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


async def kept(client, house, **fields):
    """(seconds, tokens) of each point that the request keeps its prompt up to."""
    answer = await client.post(CHAT, json=HELLO | fields)
    assert 200 == answer.status_code, answer.text
    return [(keep.for_s, keep.num_tokens) for keep in house.meter.last.job.keeps]


async def test_marked_parts_are_kept_for_their_ttl(client, house):
    law = "law " * 20
    upto = len(f"system: {law}")
    user = {"role": "user", "content": "hi"}

    def asked(*parts):
        return [{"role": "system", "content": list(parts)}, user]

    marked = asked(part(law, **BREAKPOINT), part("2026"))
    assert [(1800, upto)] == await kept(client, house, messages=marked)
    whole = len(house.engine.requests[-1].tokens)
    hour = {"ttl": "1h"}
    both = {"messages": marked, "prompt_cache_options": hour}
    assert [(3600, upto), (3600, whole)] == await kept(client, house, **both)
    both["prompt_cache_options"] = {"mode": "explicit", "ttl": "24h"}
    assert [(86_400, upto)] == await kept(client, house, **both)
    own = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    both = {"messages": asked(part(law, **own), part("2026")), "prompt_cache_options": hour}
    assert [(43_200, upto), (3600, whole)] == await kept(client, house, **both)
    marked = asked(part(law, **EPHEMERAL), part("2026"))
    assert [(300, upto)] == await kept(client, house, messages=marked)
    marked = asked(part(law, cache_control={"type": "ephemeral", "ttl": "1h"}))
    assert 3600 == (await kept(client, house, messages=marked))[0][0]
    marked = [{"role": "system", "content": law, **EPHEMERAL}, user]
    [(for_s, num_tokens)] = await kept(client, house, messages=marked)
    assert (300, True) == (for_s, num_tokens >= upto)
    assert [] == await kept(client, house)


async def test_a_mark_on_the_whole_chat_keeps_the_whole_prompt(client, house):
    """OpenRouter's automatic caching, as Messages has it."""
    found = await kept(client, house, cache_control={"type": "ephemeral", "ttl": "1h"})
    assert [(3600, len(house.engine.requests[-1].tokens))] == found


@pytest.mark.parametrize("inside", [False, True])
async def test_marked_tools_are_kept_with_what_the_system_says(client, house, inside):
    """The template of these tests has no tools: they would stand before the first turn's text."""
    function = {"name": "look"}
    tool = {"type": "function", "function": function}
    (function if inside else tool).update(EPHEMERAL)
    law, user = {"role": "system", "content": "law " * 20}, {"role": "user", "content": "hi"}
    found = await kept(client, house, messages=[user], tools=[tool])
    assert [(300, len("user: "))] == found
    found = await kept(client, house, messages=[law, user], tools=[tool])
    assert [(300, len(f"system: {law['content']}\nuser: "))] == found


async def test_at_most_the_latest_four_are_kept(client, house):
    parts = [part(f"page {number} ", **EPHEMERAL) for number in range(7)]
    asked = [{"role": "user", "content": parts}]
    assert 4 == len(await kept(client, house, messages=asked))
    found = await kept(client, house, messages=asked, prompt_cache_options={})
    assert [300, 300, 300, 1800] == [for_s for for_s, _ in found]


async def test_explicit_without_a_mark_does_not_use_the_cache(client, house):
    await kept(client, house, prompt_cache_options={"mode": "explicit"})
    assert not house.engine.requests[-1].cache
    await kept(client, house, prompt_cache_options={"mode": "implicit"})
    assert house.engine.requests[-1].cache


SHORT = part("a", prompt_cache_breakpoint={"mode": "explicit", "ttl": "2m"})


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_options": {"ttl": "2m"}},
        {"prompt_cache_options": {"mode": "often"}},
        {"prompt_cache_options": {"prewarm": True}},
        {"prompt_cache_options": {"time": "24h"}},
        {"prompt_cache_options": {}, "prompt_cache_retention": "24h"},
        {"cache_control": {"type": "ephemeral"}, "prompt_cache_retention": "24h"},
        {"cache_control": {"type": "lasting"}},
        {"service_tier": 5},
        {"tools": [{"type": "function", "function": {"name": "f"}, "cache_control": {}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "cache_control": "x"}}]},
        {"messages": [{"role": "user", "content": [part("a", **BREAKPOINT, **EPHEMERAL)]}]},
        {"messages": [{"role": "user", "content": [SHORT]}]},
    ],
)
async def test_what_cannot_be_kept_is_refused(client, fields):
    assert 400 == (await client.post(CHAT, json=HELLO | fields)).status_code


async def test_responses_keep_what_their_parts_mark(client, house):
    law = "law " * 20
    said = [{"type": "input_text", "text": law, **BREAKPOINT}]
    body = {
        "model": "bytes",
        "instructions": "Be short.",
        "input": [{"role": "system", "content": said}, {"role": "user", "content": "hi"}],
    }
    answer = await client.post("/v1/responses", json=body)
    assert 200 == answer.status_code, answer.text
    [keep] = house.meter.last.job.keeps
    # As with Messages: up to the text of the first message after the system's.
    upto = len(f"system: Be short.\n\n{law}\nuser: ")
    assert (1800, upto) == (keep.for_s, keep.num_tokens)
