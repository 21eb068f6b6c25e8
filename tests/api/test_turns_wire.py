"""A chat's next turn is told at which token it parts from what the turn before left, and why."""

import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from api.access.auth import Salts
from api.job import Divergence, DivergenceReason, Transcript
from api.requests.turns import Conversations, assistant_message, turn_of
from tests.api.conftest import of, running
from tests.support.wire import ByteTokenizer, Script, byte_model, fake_house
from tiers.blocks.keys import CacheScope

CHAT = "/v1/chat/completions"
ASK = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "and?"}
FIRST = "user: hi\nassistant: "
Messages = Sequence[dict[str, Any]]


class StrippingTokenizer(ByteTokenizer):
    """Its template leaves the reasoning out of old answers, as reasoning models' do."""

    def render(self, messages, **options):
        plain = [m | {"content": re.sub("<think>.*</think>", "", m["content"])} for m in messages]
        return super().render(plain, **options)


class PairingTokenizer(ByteTokenizer):
    """Has a token for `ab`, which the scripted engine never generates."""

    def encode(self, text, **_):
        return array("i", [255 if pair == "ab" else ord(pair) for pair in re.findall("ab|.", text)])

    def token_bytes(self, token):
        return b"ab" if token == 255 else super().token_bytes(token)

    def render(self, messages, *, add_generation_prompt=True, **_):
        text = "".join(f"{m['role'][0]}:{m['content']}|" for m in messages)
        return text + ("a:" if add_generation_prompt else "")


async def second_turn(tokenizer, answer, *between, **fields):
    """Of a second turn whose first was answered with `answer`: where it parts, of how many tokens,
    and why; or nothing."""
    model = replace(byte_model(), tokenizer=tokenizer)
    house = fake_house(models=[model])
    house.engine.script = Script(answer=answer)
    body = {"model": "bytes", "cachesvc": {"details": True}, "max_tokens": 100} | fields
    async with running(house) as (_, client):
        first = await client.post(CHAT, json=body | {"messages": [ASK]})
        assert "diverged_at_token" not in first.text
        messages = [ASK, *(between or [{"role": "assistant", "content": answer}]), MORE]
        second = (await client.post(CHAT, json=body | {"messages": messages})).json()
        told = {k: v for k, v in second["cachesvc"].items() if k.startswith("diverged")}
        return told and of(told, *(f"diverged_{name}" for name in ("at_token", "of_tokens", "by")))


@pytest.mark.parametrize("n", [1, 3])
async def test_a_continued_turn_does_not_diverge(n):
    assert {} == await second_turn(ByteTokenizer(), "one two", n=n)


async def test_a_template_that_rewrites_an_old_turn_is_named_with_the_token(capsys):
    answer = "<think>hm</think>four"
    told = await second_turn(StrippingTokenizer(), answer)
    assert (len(FIRST), len(FIRST + answer), "template") == told
    assert f"diverged_at_token={len(FIRST)} diverged_by=template" in capsys.readouterr().out


async def test_a_tokenizer_that_spells_the_answer_otherwise_is_named_with_the_token():
    told = await second_turn(PairingTokenizer(), "xxabyy")
    at = len("u:hi|a:xx")
    assert (at, at + 4, "tokenizer") == told


@pytest.mark.parametrize("role", ["assistant", "user"])
async def test_messages_that_the_client_changed_are_no_parting(role):
    between = {"role": role, "content": "an answer that the client has edited"}
    assert {} == await second_turn(ByteTokenizer(), "one two", between)


async def test_an_uncached_turn_is_not_reported():
    fields = {"cachesvc": {"details": True, "cache": False}}
    assert {} == await second_turn(StrippingTokenizer(), "<think>hm</think>four", **fields)


def test_tenants_models_tools_and_arguments_name_their_own_conversations():
    salts = Salts(b"secret")
    scopes = [CacheScope(tenant=salts.of_tenant(name)) for name in ("a", "b")]
    scopes.append(replace(scopes[0], weights=b"other"))
    tools = [{"type": "function", "function": {"name": "f"}}]
    turns = [turn_of(scope, [ASK]) for scope in scopes] + [turn_of(scopes[0], [ASK], tools)]
    turns.append(turn_of(scopes[0], [ASK], arguments={"reasoning_effort": "low"}))
    assert 5 == len({turn.keys for turn in turns})
    assert turn_of(scopes[0], [ASK]) == turns[0]
    assert turn_of(scopes[0], [ASK, MORE]).keys[:1] == turns[0].keys


def test_what_is_remembered_is_bounded_and_the_oldest_goes():
    conversations, tokenizer = Conversations(1000), ByteTokenizer()
    prompt = array("i", range(100))

    def turn(number, *more):
        return turn_of(CacheScope(), [{"role": "user", "content": str(number)}, *more])

    for number in range(20):
        conversations.remember(turn(number), prompt, [Transcript("abc", (97, 98, 99))], tokenizer)
        assert conversations.num_tokens <= 1000
    other = array("i", [7] * 120)
    answered = {"role": "assistant", "content": "abc"}
    assert None is conversations.divergence(turn(0, answered), other, tokenizer)
    expected = Divergence(0, 103, DivergenceReason.TEMPLATE)
    assert expected == conversations.divergence(turn(19, answered), other, tokenizer)


async def two_responses(tokenizer, answer, *, second=None, **fields):
    """The second response's details, and the tokens that the first left and that the second had.
    `second` are its fields where they are others."""
    house = fake_house(models=[byte_model(tokenizer=tokenizer)])
    house.engine.script = Script(answer=answer)
    asked = {"model": "bytes", **fields}
    async with running(house) as (_, client):
        first = (await client.post("/v1/responses", json=asked | {"input": "hi"})).json()
        body = asked | {"input": "and?", "previous_response_id": first["id"]} | (second or {})
        told = await client.post("/v1/responses", json=body, headers={"X-Cachesvc": "details"})
        assert 200 == told.status_code, told.text
        one, two = house.engine.requests
        return told.json()["cachesvc"], [*one.tokens, *answer.encode()], two.tokens


@pytest.mark.parametrize(
    ("tokenizer", "template", "answer", "fields"),
    [
        (StrippingTokenizer, "<think></think>", "<think>hm</think>yes", {}),
        (PairingTokenizer, "", "abab", {}),
        (
            ByteTokenizer,
            "{{ tools }}<tool_call>",
            'I look. <tool_call>{"name":"f","arguments":{"a":1}}</tool_call>',
            {"tools": [{"type": "function", "name": "f"}]},
        ),
    ],
    ids=["a template that drops reasoning", "a tokenizer that re-cuts text", "calls"],
)
async def test_previous_response_id_begins_with_all_that_the_last_left(
    tokenizer, template, answer, fields
):
    made = tokenizer()
    made.chat_template = template
    details, left, tokens = await two_responses(made, answer, **fields)
    assert len(left) == details["replayed_tokens"]
    assert "diverged_at_token" not in details
    assert left == list(tokens[: len(left)])
    assert b"and?" in b"".join(made.token_bytes(token) for token in tokens[len(left) :])


class HeadedTokenizer(ByteTokenizer):
    """Its template begins with the effort that is asked for."""

    chat_template = "{{ reasoning_effort }}"

    def render(self, messages, *, template_arguments=None, **options):
        effort = (template_arguments or {}).get("reasoning_effort", "medium")
        return f"effort: {effort}\n" + super().render(messages, **options)


@pytest.mark.parametrize("effort", ["low", "high"])
async def test_a_turn_with_other_arguments_of_the_template_is_rendered_with_them(effort):
    second = {"reasoning": {"effort": effort}}
    details, _, tokens = await two_responses(
        HeadedTokenizer(), "yes", reasoning={"effort": "low"}, second=second
    )
    assert ByteTokenizer().decode(tokens).startswith(f"effort: {effort}\n")
    assert (effort == "low") is ("replayed_tokens" in details)


async def test_another_tenants_turn_is_not_replayed():
    conversations = Conversations(10_000)
    messages = [ASK, {"role": "assistant", "content": "yes"}, MORE]
    ours, theirs = (
        turn_of(CacheScope(weights=b"w", tokenizer=b"t", layout=b"l", tenant=salt), messages)
        for salt in (b"a", b"b")
    )
    first = replace(ours, keys=ours.keys[:1], roles=ours.roles[:1])
    said = [Transcript("yes", (121, 101, 115))]
    conversations.remember(first, array("i", [1]), said, ByteTokenizer(), assistant_message)
    found = conversations.replay(ours)
    assert (1, [1, 121, 101, 115], "") == (found.place, list(found.tokens), found.rest)
    assert conversations.replay(theirs) is None


async def test_half_a_character_at_the_end_is_replayed_as_the_text_that_was_sent():
    details, left, tokens = await two_responses(ByteTokenizer(), "one \xe9", max_output_tokens=5)
    assert len(FIRST + "one ") == details["replayed_tokens"]
    assert left[: len(FIRST + "one ")] == list(tokens[: len(FIRST + "one ")])
    assert "assistant: one \ufffd\nuser: and?" in ByteTokenizer().decode(tokens)
