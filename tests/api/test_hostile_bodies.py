"""What a stranger may put into a body or a header: answered with a 4xx, after little work."""

import gc
from typing import Any

import pytest
from pydantic import ValidationError

from api.errors import NotJson
from api.routes.tokenize import DetokenizeBody
from api.shapes.body import ITEMS_MAX, MESSAGES_MAX, parse
from api.shapes.schemas import BIASES_MAX, IDS_MAX, STOP_CHARS_MAX, ChatBody, CompletionBody
from engine.structure import MAX_DEPTH, MAX_VALUES
from tests.support.wire import byte_model

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"role": "user", "content": "hi"}
MODEL = byte_model()


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "bytes", "messages": [USER], "max_tokens": 2} | fields


def nested(levels: int) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for _ in range(levels):
        document = {"a": document}
    return document


def calling(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": "", "tool_calls": list(calls)}]


TOO_MUCH = [
    (CHAT, chat(messages=[USER] * (MESSAGES_MAX + 1)), "messages"),
    (CHAT, chat(messages=[{"role": "user", "content": [{}] * (ITEMS_MAX + 1)}]), "messages[0]"),
    (CHAT, chat(tools=[{}] * (ITEMS_MAX + 1)), "tools"),
    (CHAT, chat(tools=[nested(MAX_DEPTH)]), "tools"),
    (CHAT, chat(tools=[{"enum": [1] * MAX_VALUES}]), "tools"),
    (CHAT, chat(messages=calling(nested(MAX_DEPTH))), "messages[1].tool_calls"),
    (CHAT, chat(stop=["a" * (STOP_CHARS_MAX + 1)]), "stop"),
    (CHAT, chat(stop_token_ids=[1] * (ITEMS_MAX + 1)), "stop_token_ids"),
    (CHAT, chat(logit_bias={str(i): 1 for i in range(BIASES_MAX + 1)}), "logit_bias"),
    (CHAT, chat(logit_bias={"9" * 5000: 1}), "logit_bias"),
    (CHAT, chat(repetition_penalty=1e-300), "repetition_penalty"),
    (CHAT, chat(top_k=1 << 40), "top_k"),
    (CHAT, chat(seed=-(1 << 63) - 1), "seed"),
    (CHAT, chat(min_tokens=1 << 40), "min_tokens"),
    (TEXT, {"model": "bytes", "prompt": [1, 2], "max_tokens": 1 << 40}, "max_tokens"),
    (CHAT, chat(structured_outputs={"json": {"enum": [1] * MAX_VALUES}}), "structured_outputs"),
    (CHAT, chat(structured_outputs={"choice": ["a"] * MAX_VALUES}), "structured_outputs.choice"),
    (CHAT, chat(messages=[{"role": "user", "content": "x" * (MODEL.max_chars + 1)}]), "messages"),
    (CHAT, chat(messages=[USER | {"name": "x" * (MODEL.max_chars + 1)}]), "messages"),
    (CHAT, chat(tools=[tool(description="x" * MODEL.max_chars)]), "messages"),
    (TEXT, {"model": "bytes", "prompt": [1] * (IDS_MAX + 1)}, "prompt"),
    (TEXT, {"model": "bytes", "prompt": "x" * (MODEL.max_chars + 1)}, "prompt"),
    ("/tokenize", {"prompt": "x" * (MODEL.max_chars + 1)}, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "param"), TOO_MUCH)
async def test_more_than_is_served_is_refused_by_name(client, path, body, param):
    answer = await client.post(path, json=body)
    error = answer.json()["error"]
    assert 400 == answer.status_code
    assert error["param"].startswith(param)
    assert len(error["message"]) < 400


async def test_as_much_as_is_served_is_served(client):
    body = chat(
        tools=[tool(parameters={"type": "object", "default": nested(MAX_DEPTH - 5)})],
        messages=calling(nested(MAX_DEPTH - 2)),
        stop=["~" * STOP_CHARS_MAX],
    )
    answer = await client.post(CHAT, json=body)
    assert 200 == answer.status_code, answer.text


WRONG = [
    (ChatBody, "messages", [{"model": "m"}, 1]),
    (ChatBody, "tools", [1]),
    (ChatBody, "stop", [1]),
    (ChatBody, "stop_token_ids", [""]),
    (CompletionBody, "prompt", ["a", 1]),
    (DetokenizeBody, "tokens", [""]),
]


@pytest.mark.parametrize(("kind", "name", "wrong"), WRONG)
def test_a_list_is_looked_through_to_its_first_wrong_item(kind, name, wrong):
    """Pydantic's default reports them all, which took minutes for a body of 16 MiB."""
    given = wrong * 500 if isinstance(wrong, list) else wrong
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({"model": "m", "messages": [USER], "prompt": "a", name: given})
    found = [error for error in refused.value.errors() if error["loc"][0] == name]
    assert 1 <= len(found) <= 3


@pytest.mark.parametrize("raw", [b'{"tokens": [1]', b'{"tokens": [1}'])
def test_collections_go_on_after_a_body_that_is_no_json(raw):
    with pytest.raises(NotJson):
        parse(raw, DetokenizeBody)
    assert gc.isenabled()
