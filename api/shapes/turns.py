"""The messages of Anthropic's protocol as messages of a chat."""

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import ConfigDict

from api.errors import InvalidRequest
from api.shapes.blocks import (
    ASSISTANT,
    RESULT,
    SYSTEM,
    TEXTS_JOIN,
    USER,
    ContentReader,
    checked,
)
from api.shapes.body import Body, Items
from api.shapes.breakpoints import CacheControl
from api.shapes.translation import Plain, call_message


class ContentBlock(Body):
    """One block of a message's content, of any type."""

    model_config = ConfigDict(extra="allow")

    type: str
    cache_control: CacheControl | None = None

    @property
    def asks_to_cite(self) -> bool:
        asked = (self.model_extra or {}).get("citations")
        return isinstance(asked, dict) and bool(asked.get("enabled"))

    def plain(self, where: str) -> Plain:
        return {"type": self.type, **checked(self.model_extra or {}, where)}


class TurnMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Items[ContentBlock]
    clear_at: Literal["never"] | None = None
    output_config: None = None  # refused


def turn_messages(reader: ContentReader, message: TurnMessage, where: str) -> Iterator[Plain]:
    """A message as one or several of a chat. Raises Unsupported and InvalidRequest, by place."""
    content = message.content
    if isinstance(content, str):
        yield {"role": message.role, "content": content}
    elif message.role == "assistant":
        yield _assistant(reader, content, where)
    elif message.role == "system":
        yield {"role": "system", "content": texts_of(reader, content, SYSTEM, where)}
    else:
        yield from _user(reader, content, where)


def _assistant(reader: ContentReader, blocks: Sequence[ContentBlock], where: str) -> Plain:
    texts, thoughts, calls = [], list[str](), []
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        plain = block.plain(place)
        match block.type:
            case "tool_use":
                calls.append(_call(plain, place))
            case "thinking":
                thoughts.append(str(plain.get("thinking") or ""))
            case _:
                texts.append(reader.text(plain, ASSISTANT, place))
    message: Plain = {"role": "assistant", "content": TEXTS_JOIN.join(filter(None, texts))}
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


def _user(reader: ContentReader, blocks: Sequence[ContentBlock], where: str) -> Iterator[Plain]:
    """A user's turn as messages. Each tool result is a message of its own, in order with the
    texts."""
    texts: list[str] = []
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        plain = block.plain(place)
        if block.type != "tool_result":
            texts.append(reader.text(plain, USER, place))
            continue
        if texts:
            yield {"role": "user", "content": TEXTS_JOIN.join(texts)}
        yield _result(reader, plain, place)
        texts = []
    if texts:
        yield {"role": "user", "content": TEXTS_JOIN.join(texts)}


def _result(reader: ContentReader, block: Plain, where: str) -> Plain:
    """A tool's message."""
    content = block.get("content") or ""
    if not isinstance(content, str | list) or not isinstance(block.get("tool_use_id"), str):
        raise InvalidRequest(
            f"{where} must have a tool_use_id, and as content a text or a list.", param=where
        )
    several = [content] if isinstance(content, str) else content
    places = (f"{where}.content[{number}]" for number in range(len(several)))
    text = TEXTS_JOIN.join(
        reader.texts(each, RESULT, place) for each, place in zip(several, places, strict=True)
    )
    text = f"Error: {text}" if block.get("is_error") is True else text
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}


def texts_of(reader: ContentReader, blocks: Sequence[ContentBlock], within: str, where: str) -> str:
    places = [f"{where}[{number}]" for number in range(len(blocks))]
    return TEXTS_JOIN.join(
        reader.text(block.plain(place), within, place)
        for block, place in zip(blocks, places, strict=True)
    )
