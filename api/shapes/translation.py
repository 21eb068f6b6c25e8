"""Shared parts of the translations of other protocols into a chat."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import orjson

from api.errors import InvalidRequest
from api.shapes.body import checked
from api.shapes.message import SYSTEM_ROLES, mark_of
from api.shapes.schemas import ChatBody

Plain = dict[str, Any]
SYSTEMS_JOIN = "\n\n"


def chat_body(fields: Mapping[str, Any]) -> ChatBody:
    """A chat from these fields, without those that are None. Raises InvalidRequest like `parse`."""
    return checked({name: v for name, v in fields.items() if v is not None}, ChatBody)


def going_on(messages: list[Plain], param: str, barred: Mapping[str, bool]) -> Plain:
    """The fields of a chat that goes on with its last message, if that is the assistant's.

    An empty one begins a new answer. Raises InvalidRequest for one without a text to continue, and
    for a field that is `barred` (true) because it shapes an answer from its beginning.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        return {"messages": messages}
    if last.get("tool_calls"):
        raise InvalidRequest(
            f"{param} ends with calls of tools; send their results after them.", param=param
        )
    if not (last["content"].strip() if isinstance(last["content"], str) else last["content"]):
        if not last.get("reasoning_content"):
            return {"messages": messages[:-1]}
        raise InvalidRequest(
            f"{param} ends with reasoning, which cannot be continued; add the text after it, or "
            "leave it out.",
            param=param,
        )
    for name in (name for name, given in barred.items() if given):
        raise InvalidRequest(
            f"{name} shapes an answer from its beginning, and {param} ends with one that has "
            "begun; leave out one of the two.",
            param=name,
        )
    return {"messages": messages, "continue_final_message": True}


def with_answer(messages: Sequence[Plain], answer: Plain) -> list[Plain]:
    """The chat with its answer, which goes on with a last message of the assistant."""
    if not messages or messages[-1]["role"] != "assistant":
        return [*messages, answer]
    begun = messages[-1]["content"]
    parts = begun if isinstance(begun, list) else [text_part(begun)]
    text = "".join(part["text"] for part in parts) + (answer["content"] or "")
    return [*messages[:-1], messages[-1] | answer | {"content": text}]


def text_part(text: str) -> Plain:
    return {"type": "text", "text": text}


def content_of(pieces: Sequence[tuple[str, Plain]], join: str = "") -> str | list[Plain]:
    """Texts, each with its mark or an empty one, as a message's content: in parts if one is
    marked."""
    joined = [(join + text if number else text, mark) for number, (text, mark) in enumerate(pieces)]
    if any(mark for _, mark in pieces):
        return [text_part(text) | mark for text, mark in joined]
    return "".join(text for text, _ in joined)


def merged_systems(messages: list[Plain]) -> list[Plain]:
    """Merges the leading system messages into one, because templates accept only one.

    Their parts keep their marks.
    """
    leading = list(takewhile(lambda each: each["role"] in SYSTEM_ROLES, messages))
    if len(leading) < 2:
        return messages
    pieces = list[tuple[str, Plain]]()
    for number, content in enumerate(each["content"] for each in leading):
        parts = content if isinstance(content, list) else [text_part(content)]
        pieces += [(SYSTEMS_JOIN, {})] if number else []
        pieces += [(part["text"], mark_of(part)) for part in parts]
    return [{"role": "system", "content": content_of(pieces)}, *messages[len(leading) :]]


def call_message(name: str, call_id: str, arguments: object) -> Plain:
    """One of an assistant's `tool_calls`. `arguments` is JSON text or the parsed value."""
    written = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": written}}
