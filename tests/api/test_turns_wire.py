"""A chat's next turn is told at which token it parts from what the turn before left, and why."""

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from api.access.auth import Salts
from api.requests.turns import Conversations, Parting, PartReason, Transcript, turn_of
from api.testing import ByteTokenizer, Script, byte_model, fake_house
from tests.api.conftest import running
from tiers.blocks.keys import CacheScope

CHAT = "/v1/chat/completions"
ASK = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "and?"}
FIRST = "user: hi\nassistant: "


class StrippingTokenizer(ByteTokenizer):
    """Its template leaves the reasoning out of old answers, as reasoning models' do."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> "array[int]":
        plain = [
            {**message, "content": re.sub("<think>.*</think>", "", message["content"])}
            for message in messages
        ]
        return super().chat(plain, add_generation_prompt=add_generation_prompt, tools=tools)


class PairingTokenizer(ByteTokenizer):
    """Has a token for `ab`, which the scripted engine never generates."""

    def encode(self, text: str) -> "array[int]":
        return array("i", [255 if pair == "ab" else ord(pair) for pair in re.findall("ab|.", text)])

    def token_bytes(self, token: int) -> bytes:
        return b"ab" if token == 255 else super().token_bytes(token)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> "array[int]":
        text = "".join(f"{m['role'][0]}:{m['content']}|" for m in messages)
        return self.encode(text + ("a:" if add_generation_prompt else ""))


async def second_turn(
    tokenizer: ByteTokenizer, answer: str, *between: dict[str, str], **fields: object
) -> dict[str, Any]:
    """The vendor block of a second turn whose first was answered with `answer`."""
    model = replace(byte_model(), tokenizer=tokenizer)
    house = fake_house(models=[model])
    house.engine.script = Script(answer=answer)
    body = {"model": "bytes", "cachesvc": {"details": True}, "max_tokens": 100} | fields
    async with running(house) as (_, client):
        first = await client.post(CHAT, json=body | {"messages": [ASK]})
        assert "parted_at_token" not in first.text
        messages = [ASK, *(between or [{"role": "assistant", "content": answer}]), MORE]
        second: dict[str, Any] = (
            await client.post(CHAT, json=body | {"messages": messages})
        ).json()
        return {k: v for k, v in second["cachesvc"].items() if k.startswith("parted")}


@pytest.mark.parametrize("n", [1, 3])
async def test_a_turn_that_goes_on_parts_nowhere(n: int) -> None:
    assert {} == await second_turn(ByteTokenizer(), "one two", n=n)


async def test_a_template_that_rewrites_an_old_turn_is_named_with_the_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = "<think>hm</think>four"
    told = await second_turn(StrippingTokenizer(), answer)
    assert {
        "parted_at_token": len(FIRST),
        "parted_of_tokens": len(FIRST + answer),
        "parted_by": "template",
    } == told
    assert f"parted_at_token={len(FIRST)} parted_by=template" in capsys.readouterr().out


async def test_a_tokenizer_that_spells_the_answer_otherwise_is_named_with_the_token() -> None:
    told = await second_turn(PairingTokenizer(), "xxabyy")
    at = len("u:hi|a:xx")
    assert {"parted_at_token": at, "parted_of_tokens": at + 4, "parted_by": "tokenizer"} == told


@pytest.mark.parametrize(
    "between",
    [
        [{"role": "assistant", "content": "an answer that the client has edited"}],
        [{"role": "user", "content": "no answer between"}],
    ],
)
async def test_messages_that_the_client_changed_are_no_parting(between: list[Any]) -> None:
    assert {} == await second_turn(ByteTokenizer(), "one two", *between)


async def test_what_is_not_cached_is_not_told() -> None:
    fields = {"cachesvc": {"details": True, "cache": False}}
    assert {} == await second_turn(StrippingTokenizer(), "<think>hm</think>four", **fields)


def test_tenants_models_and_tools_name_their_own_conversations() -> None:
    salts = Salts(b"secret")
    scopes = [CacheScope(tenant=salts.of_tenant(name)) for name in ("a", "b")]
    scopes.append(replace(scopes[0], weights=b"other"))
    tools = [{"type": "function", "function": {"name": "f"}}]
    turns = [turn_of(scope, [ASK]) for scope in scopes] + [turn_of(scopes[0], [ASK], tools)]
    assert 4 == len({turn.keys for turn in turns})
    assert turn_of(scopes[0], [ASK]) == turns[0]
    assert turn_of(scopes[0], [ASK, MORE]).keys[:1] == turns[0].keys


def test_what_is_remembered_is_bounded_and_the_oldest_goes() -> None:
    conversations, tokenizer = Conversations(1000), ByteTokenizer()
    prompt = array("i", range(100))

    def turn(number: int, *more: dict[str, str]) -> Any:
        return turn_of(CacheScope(), [{"role": "user", "content": str(number)}, *more])

    for number in range(20):
        conversations.remember(turn(number), prompt, [Transcript("abc", (97, 98, 99))], tokenizer)
        assert conversations.num_tokens <= 1000
    other = array("i", [7] * 120)
    answered = {"role": "assistant", "content": "abc"}
    assert None is conversations.parting(turn(0, answered), other, tokenizer)
    expected = Parting(0, 103, PartReason.TEMPLATE)
    assert expected == conversations.parting(turn(19, answered), other, tokenizer)
