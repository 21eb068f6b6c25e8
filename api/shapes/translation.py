"""Shared parts of the translations of other protocols into a chat."""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import orjson
from pydantic import ValidationError

from api.shapes.body import refusal
from api.shapes.message import SYSTEM_ROLES
from api.shapes.schemas import ChatBody

Plain = dict[str, Any]
SYSTEMS_JOIN = "\n\n"


def chat_body(fields: Mapping[str, Any]) -> ChatBody:
    """A chat from these fields, without those that are None. Raises InvalidRequest like `parse`."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatBody.model_validate(given)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False, include_context=False)) from None


def text_part(text: str) -> Plain:
    return {"type": "text", "text": text}


def image_part(url: str) -> Plain:
    return {"type": "image_url", "image_url": {"url": url}}


def merged_systems(messages: list[Plain]) -> list[Plain]:
    """Merges the leading system messages into one, because templates accept only one.

    Their parts keep their marks.
    """
    leading = list(takewhile(lambda each: each["role"] in SYSTEM_ROLES, messages))
    if len(leading) < 2:
        return messages
    contents = [each["content"] for each in leading]
    if all(isinstance(content, str) for content in contents):
        merged: object = SYSTEMS_JOIN.join(contents)
    else:
        merged = [
            part
            for number, content in enumerate(contents)
            for part in (
                *([text_part(SYSTEMS_JOIN)] if number else ()),
                *([text_part(content)] if isinstance(content, str) else content),
            )
        ]
    return [{"role": "system", "content": merged}, *messages[len(leading) :]]


def call_message(name: str, call_id: str, arguments: object) -> Plain:
    """One of an assistant's `tool_calls`. `arguments` is JSON text or the parsed value."""
    written = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": written}}
