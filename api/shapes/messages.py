"""Anthropic's Messages: the body, checked, and as a chat."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from api.errors import InvalidRequest, Unsupported
from api.shapes.body import MESSAGES_MAX, Body, Items
from api.shapes.breakpoints import NAME_MAX, CacheControl
from api.shapes.fields import MESSAGES, refuse_unserved
from api.shapes.schemas import ChatBody, Extension
from api.shapes.translation import (
    Plain,
    call_message,
    chat_body,
    image_part,
    merged_systems,
    text_part,
)
from engine.bounds import MAX_COUNT
from engine.structure import check_document

TEXTS_JOIN = "\n\n"  # between the text blocks of one message


class ContentBlock(Body):
    """One block of a message's content, of any type."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None


class TurnMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Items[ContentBlock]
    clear_at: None = None  # refused, as the next
    output_config: None = None


EMPTY_MESSAGE = TurnMessage(role="user", content="")


class AnthropicTool(Body):
    model_config = ConfigDict(extra="allow")

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(Body):
    user_id: str | None = None


class Diagnostics(Body):
    previous_message_id: Annotated[str, Field(max_length=NAME_MAX)] | None = None


class OutputConfig(Body):
    effort: str | None = None
    format: dict[str, Any] | None = None
    task_budget: None = None  # refused


@dataclass(frozen=True, slots=True)
class MarkedPlace:
    """A point of the prompt to keep it up to.

    It is after `messages` messages and `blocks` blocks of the last of them (0: all). Before the
    first message it is after `blocks` blocks of the system prompt (None: all), including the tools.
    """

    ttl: Literal["5m", "1h"]
    messages: int = 0
    blocks: int = 0
    system: int | None = None


class CountBody(Body):
    """The fields that make up the prompt, which are all that `count_tokens` needs."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: Annotated[
        list[TurnMessage], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)
    ]
    system: str | Items[ContentBlock] | None = None
    tools: Items[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: dict[str, Any] | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None

    def as_chat(self, **more: object) -> ChatBody:
        """The body as a chat. Raises InvalidRequest or Unsupported, by field."""
        refuse_unserved(self.model_extra or {}, MESSAGES)
        self._refuse_edits()
        output = self.output_config or OutputConfig()
        choice = self.tool_choice
        return chat_body(
            {
                "model": self.model,
                "messages": merged_systems([*self._system(), *self._turns()]),
                "tools": [_function(n, tool) for n, tool in enumerate(self.tools or [])] or None,
                "tool_choice": _chosen(choice) if choice else None,
                "parallel_tool_calls": None
                if choice is None or choice.disable_parallel_tool_use is None
                else not choice.disable_parallel_tool_use,
                "reasoning_effort": output.effort,
                "response_format": _format(output.format or self.output_format),
                **more,
            }
        )

    def breakpoints(self) -> "Iterator[MarkedPlace]":
        """The points up to which the client asks to keep the prompt, in order."""
        for tool in self.tools or []:
            if tool.cache_control is not None:
                yield MarkedPlace(tool.cache_control.ttl or "5m")
        for number, block in enumerate(self.system if isinstance(self.system, list) else []):
            if block.cache_control is not None:
                yield MarkedPlace(block.cache_control.ttl or "5m", system=number + 1)
        for number, message in enumerate(self.messages):
            content = message.content if isinstance(message.content, list) else []
            for place, block in enumerate(content):
                if block.cache_control is not None:
                    ttl = block.cache_control.ttl or "5m"
                    yield MarkedPlace(ttl, messages=number + 1, blocks=place + 1)
        if self.cache_control is not None:
            yield MarkedPlace(self.cache_control.ttl or "5m", messages=len(self.messages))

    def until(self, point: "MarkedPlace") -> "CountBody | None":
        """The body cut at a breakpoint; None if that is its end.

        A chat must have a message. A cut before the first one gets an empty message, which diverges
        from the whole chat where the first message's text begins.
        """
        if not point.messages:
            system = self.system
            if isinstance(system, list) and point.system is not None:
                system = system[: point.system]
            return self.model_copy(update={"system": system, "messages": [EMPTY_MESSAGE]})
        *before, last = self.messages[: point.messages]
        content = last.content if isinstance(last.content, list) else []
        blocks = point.blocks or len(content)
        if point.messages == len(self.messages) and blocks == len(content):
            return None
        cut = last.model_copy(update={"content": content[:blocks]})
        return self.model_copy(update={"messages": [*before, cut]})

    def _refuse_edits(self) -> None:
        """Refuses context edits: the template decides about old reasoning, and tool results are
        never dropped."""
        for edit in (self.context_management or {}).get("edits") or []:
            kind = edit.get("type", "") if isinstance(edit, dict) else ""
            if not str(kind).startswith("clear_thinking"):
                raise Unsupported(
                    "context_management.edits other than clear_thinking are not served; shorten "
                    "the conversation yourself.",
                    param="context_management.edits",
                )

    def _system(self) -> Iterator[Plain]:
        if self.system is None:
            return
        if isinstance(self.system, str):
            text = self.system
        else:
            text = TEXTS_JOIN.join(_text(b, f"system[{n}]") for n, b in enumerate(self.system))
        yield {"role": "system", "content": text}

    def _turns(self) -> Iterator[Plain]:
        for number, message in enumerate(self.messages):
            if isinstance(message.content, str):
                yield {"role": message.role, "content": message.content}
            elif message.role == "assistant":
                yield _assistant(message.content, f"messages[{number}].content")
            else:
                yield from _user(message, f"messages[{number}].content")


class MessagesBody(CountBody):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    diagnostics: Diagnostics | None = None
    cachesvc: Extension | None = None

    def generation(self) -> ChatBody:
        """The chat with the fields that shape its answer."""
        return self.as_chat(
            max_tokens=self.max_tokens,
            stop=self.stop_sequences or None,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            user=self.metadata.user_id if self.metadata else None,
            service_tier=self.service_tier,
            cachesvc=self.cachesvc.model_dump() if self.cachesvc else None,
        )


def _assistant(blocks: list[ContentBlock], where: str) -> Plain:
    message: Plain = {"role": "assistant", "content": ""}
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        place, extra = f"{where}[{number}]", block.model_extra or {}
        match block.type:
            case "tool_use":
                calls.append(_call(extra, place))
            case "thinking":
                thoughts.append(str(extra.get("thinking") or ""))
            case "redacted_thinking":
                continue
            case _:
                texts.append(_text(block, place))
    message["content"] = TEXTS_JOIN.join(texts)
    if calls:
        message["tool_calls"] = calls
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _call(extra: Plain, where: str) -> Plain:
    name, given, call_id = extra.get("name"), extra.get("input"), extra.get("id")
    if not isinstance(name, str) or not isinstance(given, dict) or not isinstance(call_id, str):
        raise InvalidRequest(f"{where} must have an id, a name and an input object.", param=where)
    check_document(given, where)
    return call_message(name, call_id, given)


def _user(message: TurnMessage, where: str) -> Iterator[Plain]:
    """A user's turn as messages. Each tool result is a message of its own, in order with the
    texts."""
    parts: list[Plain] = []
    assert isinstance(message.content, list)
    for number, block in enumerate(message.content):
        place = f"{where}[{number}]"
        if block.type == "image" and message.role == "user":
            parts.append(image_part(_image_url(block.model_extra or {}, place)))
        elif block.type != "tool_result":
            parts.append(text_part(_text(block, place)))
        else:
            if parts:
                yield {"role": message.role, "content": _joined(parts)}
            parts = []
            yield _result(block.model_extra or {}, place)
    if parts:
        yield {"role": message.role, "content": _joined(parts)}


def _joined(parts: Sequence[Plain]) -> str | list[Plain]:
    """The parts with adjacent texts joined; a plain text if there is nothing else."""
    joined: list[Plain] = []
    for kind, group in groupby(parts, key=lambda part: part["type"]):
        if kind == "text":
            joined.append(text_part(TEXTS_JOIN.join(part["text"] for part in group)))
        else:
            joined += group
    return str(joined[0]["text"]) if [part["type"] for part in joined] == ["text"] else joined


def _image_url(extra: Plain, where: str) -> str:
    """An image block's source as a URL. Raises InvalidRequest or Unsupported."""
    source = extra.get("source")
    match source if isinstance(source, dict) else {}:
        case {"type": "base64", "data": str(data), "media_type": str(kind)}:
            return f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(url)}:
            return url
        case {"type": "file"}:
            raise Unsupported(
                f"{where}.source names a file that was uploaded, and this server keeps none; send "
                "the image itself, as base64.",
                param=f"{where}.source",
            )
    raise InvalidRequest(
        f'{where}.source must be {{"type": "base64", "media_type": "image/png", "data": "..."}}.',
        param=f"{where}.source",
    )


def _result(extra: Plain, where: str) -> Plain:
    content = extra.get("content") or ""
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        if any(part.get("type") != "text" for part in parts):
            raise Unsupported(
                f"{where}.content holds more than text; this server reads text only.",
                param=f"{where}.content",
            )
        content = TEXTS_JOIN.join(str(part.get("text") or "") for part in parts)
    if not isinstance(content, str) or not isinstance(extra.get("tool_use_id"), str):
        raise InvalidRequest(f"{where} must have a tool_use_id, and text content.", param=where)
    text = f"Error: {content}" if extra.get("is_error") is True else content
    return {"role": "tool", "tool_call_id": extra["tool_use_id"], "content": text}


def _text(block: ContentBlock, where: str) -> str:
    if block.type != "text" or block.text is None:
        raise Unsupported(
            f"{where} has type '{block.type[:40]}'; this server reads text only, as "
            '{"type": "text", "text": "..."}.',
            param=where,
        )
    return block.text


def _function(number: int, tool: AnthropicTool) -> Plain:
    if tool.type not in (None, "custom") or tool.input_schema is None:
        raise Unsupported(
            f"tools[{number}] is of type '{(tool.type or 'custom')[:40]}' or has no input_schema; "
            "this server runs no tools of its own, give such as you run.",
            param=f"tools[{number}]",
        )
    function: Plain = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _chosen(choice: AnthropicChoice) -> object:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("Missing required parameter: 'tool_choice.name'.", param="name")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _format(given: Plain | None) -> Plain | None:
    if given is None:
        return None
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise InvalidRequest(
            "output_config.format must be of type 'json_schema' and have a schema.",
            param="output_config.format",
        )
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}
