"""Fields of other servers that would change the answer are refused by name, never ignored."""

import httpx
import pytest

from tests.support.wire import FakeHouse, Script

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "bytes", "prompt": "hi"}

EITHER = {
    "allowed_token_ids": ([65], []),
    "bad_words": (["no"], []),
    "include_stop_str_in_output": (True, False),
    "length_penalty": (0.5, 1.0),
    "logits_processors": (["x"], []),
    "lora_path": ("a", None),
    "no_repeat_ngram_size": (2, 0),
    "prompt_embeds": ("AAAA", ""),
    "return_token_ids": (True, False),
    "return_tokens_as_token_ids": (True, False),
    "skip_special_tokens": (False, True),
    "spaces_between_special_tokens": (False, True),
    "truncate_prompt_tokens": (3, None),
    "typical_p": (0.5, 1),
    "use_beam_search": (True, False),
}
OF_CHAT = {
    "add_special_tokens": (True, False),
    "chat_template": ("{{ messages }}", None),
    "documents": ([{"text": "a"}], []),
    "echo": (True, False),
}
OF_TEXT = {"add_special_tokens": (False, True)}


@pytest.mark.parametrize(
    ("path", "body", "name", "value"),
    [(CHAT, HELLO, name, value) for name, (value, _) in (EITHER | OF_CHAT).items()]
    + [(TEXT, PROMPT, name, value) for name, (value, _) in (EITHER | OF_TEXT).items()],
)
async def test_a_field_that_changes_the_answer_is_refused_by_name(
    client: httpx.AsyncClient, path: str, body: dict[str, object], name: str, value: object
) -> None:
    response = await client.post(path, json=body | {name: value})
    error = response.json()["error"]
    assert (400, "unsupported_parameter", name) == (
        response.status_code,
        error["code"],
        error["param"],
    )
    assert error["message"].startswith(f"{name} is not served; ")


@pytest.mark.parametrize(
    ("path", "body", "table"), [(CHAT, HELLO, EITHER | OF_CHAT), (TEXT, PROMPT, EITHER | OF_TEXT)]
)
async def test_values_that_change_nothing_are_served(
    client: httpx.AsyncClient,
    house: FakeHouse,
    path: str,
    body: dict[str, object],
    table: dict[str, tuple[object, object]],
) -> None:
    house.engine.script = Script(answer="x")
    neutral = {name: value for name, (_, value) in table.items()}
    assert 200 == (await client.post(path, json=body | neutral)).status_code


async def test_unknown_fields_are_ignored(client: httpx.AsyncClient, house: FakeHouse) -> None:
    house.engine.script = Script(answer="x")
    response = await client.post(CHAT, json=HELLO | {"no_such_field": {"a": [1]}})
    assert 200 == response.status_code


async def test_what_has_no_effect_is_named(client: httpx.AsyncClient, house: FakeHouse) -> None:
    house.engine.script = Script(answer="x")
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = HELLO | {"store": True, "stream": True, "stream_options": options}
    answer = await client.post(CHAT, json=asked)
    named = answer.headers["x-cachesvc-ignored"].split(", ")
    assert (200, ["store", "stream_options.continuous_usage_stats"]) == (answer.status_code, named)


async def test_a_refusal_in_parts_is_its_text(client: httpx.AsyncClient, house: FakeHouse) -> None:
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    user = HELLO["messages"]
    assert isinstance(user, list)
    answer = await client.post(CHAT, json=HELLO | {"messages": [*user, said, *user]})
    assert 200 == answer.status_code, answer.text
    assert b"assistant: No." in bytes(list(house.engine.requests[-1].tokens))
    answer = await client.post(CHAT, json=HELLO | {"messages": [said | {"role": "user"}]})
    assert (400, "messages[0].content[0]") == (answer.status_code, answer.json()["error"]["param"])
