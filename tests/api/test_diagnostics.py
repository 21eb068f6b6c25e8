"""Where a prompt diverges from that of an earlier answer, in each provider's own fields."""

import json

import pytest

from billing.keys import Principal, Scope
from tests.api.conftest import running
from tests.support.wire import ByteTokenizer, Script, fake_house

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
LAW = "Rule: be brief. " * 40
TOOL = {"name": "weather", "description": "Say.", "input_schema": {"type": "object"}}
SAID = [{"role": "user", "content": "hi " * 60}]
ANSWERED = [*SAID, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "And?"}]


async def message(client, previous, messages=SAID, **fields):
    body = {"model": "bytes", "max_tokens": 5, "system": LAW, "messages": messages} | fields
    answer = await client.post(
        MESSAGES, json=body | {"diagnostics": {"previous_message_id": previous}}
    )
    assert 200 == answer.status_code, answer.text
    return answer.json()


async def response(client, earlier, **fields):
    body = {"model": "bytes", "instructions": LAW, "input": "hi " * 60} | fields
    if earlier is not None:
        body["prompt_cache_options"] = {"comparison_response_id": earlier}
    answer = await client.post(RESPONSES, json=body)
    assert 200 == answer.status_code, answer.text
    return answer.json()


async def test_a_message_that_goes_on_has_no_diagnosis(client):
    first = await message(client, None)
    assert first["diagnostics"] is None
    assert (await message(client, first["id"], ANSWERED))["diagnostics"] is None
    assert (await message(client, first["id"]))["diagnostics"] is None


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        ("system_changed", {"system": f"Today. {LAW}"}),
        ("tools_changed", {"tools": [TOOL]}),
        ("messages_changed", {"messages": [{"role": "user", "content": "ho " * 60}]}),
        ("system_changed", {"system": "Other.", "tools": [TOOL]}),
    ],
)
async def test_the_first_change_of_a_message_is_named(client, reason, fields):
    first = await message(client, None)
    told = (await message(client, first["id"], **fields))["diagnostics"]["cache_miss_reason"]
    assert reason == told["type"]
    assert 0 < told["cache_missed_input_tokens"]
    if reason == "messages_changed":  # the rules before it are still a prefix
        assert told["cache_missed_input_tokens"] < 60 * 3 + 64 + len("user: assistant: \n\n")


async def test_a_stream_tells_at_its_start(client):
    first = await message(client, None)
    body = {"model": "bytes", "max_tokens": 5, "stream": True, "messages": SAID}
    asked = body | {"diagnostics": {"previous_message_id": first["id"]}}
    answer = await client.post(MESSAGES, json=asked)
    begun = json.loads(answer.text.split("\n")[1].removeprefix("data: "))["message"]
    assert "system_changed" == begun["diagnostics"]["cache_miss_reason"]["type"]
    again = await message(client, begun["id"], SAID, system=None)
    assert again["diagnostics"] is None  # the streamed one can be compared with as well


async def test_a_message_is_compared_only_if_it_asked_for_it(client):
    body = {"model": "bytes", "max_tokens": 5, "messages": SAID}
    plain = (await client.post(MESSAGES, json=body)).json()
    missing = {"cache_miss_reason": {"type": "previous_message_not_found"}}
    assert missing == (await message(client, plain["id"]))["diagnostics"]
    assert missing == (await message(client, "msg_none"))["diagnostics"]


async def test_a_response_says_what_changed(client):
    first = await response(client, None)
    assert "prompt_cache_diagnostics" not in first
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    told = (await response(client, first["id"], tools=[tool]))["prompt_cache_diagnostics"]
    assert ("cache_miss", "tools_changed") == (told["type"], told["reason"])
    changed = await response(client, first["id"], input="ho " * 60)
    told = changed["prompt_cache_diagnostics"]
    assert "input_changed" == told["reason"]
    tokens = first["usage"]["input_tokens"]
    assert tokens == told["comparison_reusable_tokens"] + told["cache_missed_tokens"]
    assert len(LAW) // 64 * 64 <= told["comparison_reusable_tokens"] < len(LAW) + 64
    assert first["id"] == changed["prompt_cache_options"]["comparison_response_id"]
    stored = (await client.get(f"{RESPONSES}/{changed['id']}")).json()
    assert told == stored["prompt_cache_diagnostics"]


async def test_what_parts_no_prompt_here_is_no_miss(client, house):
    first = await response(client, None)
    tokens = first["usage"]["input_tokens"]
    house.engine.script = Script(hits={"hit_device": tokens - 1})
    same = await response(
        client, first["id"], prompt_cache_key="other", text={"format": {"type": "text"}}
    )
    assert {"type": "cache_hit"} == same["prompt_cache_diagnostics"]
    house.engine.script = Script(hits={})  # its blocks have left the cache
    gone = await response(client, first["id"])
    assert {"type": "unavailable"} == gone["prompt_cache_diagnostics"]


async def test_a_response_is_not_found_after_its_deletion(client):
    first = await response(client, None)
    await client.delete(f"{RESPONSES}/{first['id']}")
    for name in (first["id"], "resp_none"):
        told = (await response(client, name))["prompt_cache_diagnostics"]
        assert {"type": "comparison_response_not_found"} == told
    unstored = await response(client, None, store=False)
    told = (await response(client, unstored["id"], input="ho"))["prompt_cache_diagnostics"]
    assert "input_changed" == told["reason"]  # a fingerprint holds no text


def _turned(house, text):
    """The template renders old messages in another way from now on."""
    [model] = house.wire.inference.models.values()
    tokenizer = model.tokenizer
    assert isinstance(tokenizer, ByteTokenizer)
    render = tokenizer.render
    tokenizer.render = lambda messages, **more: text + render(messages, **more)  # type: ignore[method-assign]


async def test_a_template_that_rewrites_the_past_is_no_change_of_the_request(client, house):
    first, resp = await message(client, None), await response(client, None)
    _turned(house, "rewritten ")
    told = (await message(client, first["id"], ANSWERED))["diagnostics"]
    assert {"cache_miss_reason": {"type": "unavailable"}} == told
    told = (await response(client, resp["id"]))["prompt_cache_diagnostics"]
    assert {"type": "unavailable"} == told


class _TwoTenants:
    async def identify(self, authorization):
        return Principal((authorization or "").removeprefix("Bearer "), scopes=frozenset(Scope))


async def test_no_answer_of_another_tenant_is_compared_with():
    house = fake_house(gatekeeper=_TwoTenants())
    async with running(house) as (_, client):
        client.headers["Authorization"] = "Bearer one"
        first, resp = await message(client, None), await response(client, None)
        client.headers["Authorization"] = "Bearer two"
        told = (await message(client, first["id"]))["diagnostics"]
        assert "previous_message_not_found" == told["cache_miss_reason"]["type"]
        told = (await response(client, resp["id"]))["prompt_cache_diagnostics"]
        assert "comparison_response_not_found" == told["type"]
