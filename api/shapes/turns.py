"""The messages of Anthropic's protocol as messages of a chat."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Literal

from pydantic import ConfigDict

from api.errors import InvalidRequest
from api.shapes.blocks import ASSISTANT, RESULT, SYSTEM, TEXTS_JOIN, USER, ContentReader
from api.shapes.body import Body, Items
from api.shapes.message import CacheControl
from api.shapes.translation import Plain, call_message, content_of
from engine.structure import check_document


class ContentBlock(Body):
    """One block of a message's content, of any type."""

    model_config = ConfigDict(extra="allow")

    type: str
    cache_control: CacheControl | None = None

    @property
    def mark(self) -> Plain:
        """Its mark, as a chat's part or message has it."""
        return {"cache_control": self.cache_control} if self.cache_control is not None else {}

    @property
    def asks_to_cite(self) -> bool:
        asked = (self.model_extra or {}).get("citations")
        return isinstance(asked, dict) and bool(asked.get("enabled"))

    def plain(self, where: str) -> Plain:
        """Raises InvalidParameter for a block that is nested too deeply to read."""
        check_document(self.model_extra or {}, where)
        return {"type": self.type, **(self.model_extra or {})}


class TurnMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Items[ContentBlock]
    clear_at: Literal["never"] | None = None
    output_config: None = None  # refused


Placed = tuple[str, ContentBlock]


def turn_messages(reader: ContentReader, message: TurnMessage, where: str) -> Iterator[Plain]:
    """A message as one or several of a chat. Raises Unsupported and InvalidRequest, by place."""
    content = message.content
    if isinstance(content, str):
        yield {"role": message.role, "content": content}
        return
    placed = [(f"{where}[{number}]", block) for number, block in enumerate(content)]
    match message.role:
        case "assistant":
            yield _assistant(reader, placed)
        case "user":
            yield from _user(reader, placed)
        case "system":
            yield {"role": "system", "content": _content(reader, placed, SYSTEM)}


def system_content(blocks: Sequence[ContentBlock]) -> str | list[Plain]:
    """The body's system prompt."""
    placed = [(f"system[{number}]", block) for number, block in enumerate(blocks)]
    return _content(ContentReader(), placed, SYSTEM)


def _assistant(reader: ContentReader, placed: Sequence[Placed]) -> Plain:
    told, thoughts, calls, mark = list[Placed](), list[str](), list[Plain](), Plain()
    for place, block in placed:
        match block.type:
            case "tool_use":
                calls.append(_call(block.plain(place), place))
                mark = block.mark or mark
            case "thinking":
                thoughts.append(str(block.plain(place).get("thinking") or ""))
            case _:
                told.append((place, block))
    message: Plain = {"role": "assistant", "content": _content(reader, told, ASSISTANT), **mark}
    if calls:
        message["tool_calls"] = calls
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _call(block: Plain, where: str) -> Plain:
    name, given, call_id = block.get("name"), block.get("input"), block.get("id")
    if not isinstance(name, str) or not isinstance(given, dict) or not isinstance(call_id, str):
        raise InvalidRequest(f"{where} must have an id, a name and an input object.", param=where)
    return call_message(name, call_id, given)


def _user(reader: ContentReader, placed: Sequence[Placed]) -> Iterator[Plain]:
    """A user's turn as messages. Each tool result is a message of its own, in order with the
    texts."""
    for is_result, group in groupby(placed, lambda one: one[1].type == "tool_result"):
        if is_result:
            yield from (_result(reader, block, place) for place, block in group)
        else:
            yield {"role": "user", "content": _content(reader, group, USER)}


def _result(reader: ContentReader, block: ContentBlock, where: str) -> Plain:
    """A tool's message."""
    plain = block.plain(where)
    content = plain.get("content") or ""
    if not isinstance(content, str | list) or not isinstance(plain.get("tool_use_id"), str):
        raise InvalidRequest(
            f"{where} must have a tool_use_id, and as content a text or a list.", param=where
        )
    text = reader.texts(content, RESULT, f"{where}.content")
    text = f"Error: {text}" if plain.get("is_error") is True else text
    return {"role": "tool", "tool_call_id": plain["tool_use_id"], "content": text, **block.mark}


def _content(reader: ContentReader, placed: Iterable[Placed], within: str) -> str | list[Plain]:
    pieces = [(reader.text(b.plain(place), within, place), b.mark) for place, b in placed]
    return content_of([(text, mark) for text, mark in pieces if text], TEXTS_JOIN)
