"""OpenAI's Responses: the body, checked, and its items as a chat."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from api.errors import InvalidRequest, Unsupported
from api.shapes.body import ITEMS_MAX, MESSAGES_MAX, Body, Items
from api.shapes.fields import RESPONSES, refuse_unserved
from api.shapes.message import CacheOptions, mark_of, text_only
from api.shapes.schemas import ChatBody, Extension, Salt
from api.shapes.translation import (
    Plain,
    call_message,
    chat_body,
    content_of,
    going_on,
    merged_systems,
)
from engine.bounds import MAX_COUNT

_INCLUDES = frozenset({"reasoning.encrypted_content"})  # accepted; reasoning is never encrypted
_TEXTS = frozenset({"input_text", "output_text", "text", "refusal", "reasoning_text"})

_SAME_FIELDS = (  # of a response and a chat
    *("stream", "temperature", "top_p", "metadata", "user", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_salt"),
    "cachesvc",
)
# What is stored and shown again: other fields cost no tokens, so they would be free storage.
_TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")
_FORMAT_FIELDS = ("type", "name", "description", "schema", "strict")

# OpenAI's bounds. The response repeats these fields, and is stored with them.
LABEL_MAX = 512
Label = Annotated[str, Field(max_length=LABEL_MAX)]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)]


class Item(Body):
    """One item of the input, of any type."""

    model_config = ConfigDict(extra="allow")

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Annotated[list[dict[str, Any]], Field(max_length=ITEMS_MAX)] | None = None


class Reasoning(Body):
    effort: Label | None = None
    summary: Label | None = None


class TextConfig(Body):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(Body):
    model_config = ConfigDict(extra="allow")

    model: str
    input: str | Annotated[list[Item], Field(max_length=MESSAGES_MAX, fail_fast=True)] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: Items[str] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    stream: bool | None = None
    store: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    metadata: Metadata | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: CacheOptions | None = None
    safety_identifier: Label | None = None
    service_tier: Label | None = None
    user: Label | None = None
    cache_salt: Salt | None = None
    cachesvc: Extension | None = None

    @property
    def namespaces(self) -> dict[str, str]:
        """The namespace of each function that has one. Calls name it too."""
        return {
            function.get("name", ""): str(tool.get("name", ""))
            for tool in self.tools or []
            if tool.get("type") == "namespace"
            for function in _inner(tool)
        }

    def messages(self) -> list[Plain]:
        """The input as messages, without the history. Raises InvalidRequest or Unsupported."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}] if self.input else []
        return _merged(_messages(self.input))

    def shown_tools(self) -> list[Plain]:
        return [_shown_tool(tool) for tool in self.tools or []]

    def shown_choice(self) -> str | Plain:
        """The tool choice; only its known fields."""
        choice = self.tool_choice or "auto"
        return choice if isinstance(choice, str) else _only(choice, ("type", "name"))

    def shown_format(self) -> Plain:
        given = self.text.format if self.text else None
        return _only(given, _FORMAT_FIELDS) if given else {"type": "text"}

    def as_chat(self, history: Sequence[Plain]) -> ChatBody:
        """The chat after `history`, the chat up to `previous_response_id`. It continues a last
        message of the assistant."""
        refuse_unserved(self.model_extra or {}, RESPONSES)
        for name in self.include or []:
            if name not in _INCLUDES:
                raise Unsupported(f"include {name[:60]!r} is not served.", param="include")
        said = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages = merged_systems([*said, *history, *self.messages()])
        if not messages:
            raise InvalidRequest("input is empty; give a text or items.", param="input")
        forced = self.tool_choice not in (None, "auto", "none")
        form = _format(self.text.format) if self.text else None
        shaped = form is not None and form.get("type") != "text"
        return chat_body(
            {
                **going_on(messages, "input", {"tool_choice": forced, "text.format": shaped}),
                "model": self.model,
                "tools": list(_functions(self.tools or [], "tools")) or None,
                "tool_choice": _chosen(self.tool_choice),
                "parallel_tool_calls": self.parallel_tool_calls,
                "reasoning_effort": self.reasoning.effort if self.reasoning else None,
                "response_format": form,
                "max_completion_tokens": self.max_output_tokens,
                **{name: getattr(self, name) for name in _SAME_FIELDS},
            }
        )


def _only(given: Plain, names: Sequence[str]) -> Plain:
    return {name: given[name] for name in names if name in given}


def _shown_tool(tool: Plain) -> Plain:
    shown = _only(tool, _TOOL_FIELDS)
    if tool.get("type") == "namespace":
        shown["tools"] = [_only(function, _TOOL_FIELDS) for function in _inner(tool)]
    return shown


def _messages(items: Sequence[Item]) -> Iterator[Plain]:
    """Each item as a message. The caller merges those of one answer."""
    for number, item in enumerate(items):
        where, extra = f"input[{number}]", item.model_extra or {}
        match item.type:
            case None | "message" if item.role is not None:
                yield {"role": item.role, "content": _content(item, f"{where}.content")}
            case "function_call":
                call = call_message(*_named(extra, where, "name", "call_id", "arguments"))
                yield {"role": "assistant", "content": "", "tool_calls": [call]}
            case "function_call_output":
                (call_id,) = _named(extra, where, "call_id")
                text = _text(extra.get("output"), f"{where}.output")
                yield {"role": "tool", "tool_call_id": call_id, "content": text}
            case "reasoning":
                thought = _text(item.content, f"{where}.content") or _summary(extra)
                yield {"role": "assistant", "content": "", "reasoning_content": thought}
            case _:
                raise Unsupported(
                    f"{where} is of type {str(item.type)[:40]!r}; this server reads messages, "
                    "function_call, function_call_output and reasoning.",
                    param=where,
                )


def _merged(messages: Iterator[Plain]) -> list[Plain]:
    """Merges the items of one answer into one message with reasoning, text and calls."""
    merged: list[Plain] = []
    for message in messages:
        last = merged[-1] if merged else {}
        if message["role"] != "assistant" or last.get("role") != "assistant":
            merged.append(message)
            continue
        last["content"] = "\n\n".join(filter(None, (last["content"], message["content"])))
        for name, value in message.items():
            if name == "tool_calls":
                last[name] = [*last.get(name, ()), *value]
            elif name == "reasoning_content":
                last[name] = "\n".join(filter(None, (last.get(name), value)))
    return merged


def _named(extra: Plain, where: str, *names: str) -> tuple[str, ...]:
    for name in names:
        if not isinstance(extra.get(name), str):
            raise InvalidRequest(f"{where}.{name} must be a text.", param=f"{where}.{name}")
    return tuple(extra[name] for name in names)


def _summary(extra: Plain) -> str:
    parts = extra.get("summary")
    return "".join(str(p.get("text") or "") for p in parts) if isinstance(parts, list) else ""


def _content(item: Item, where: str) -> str | list[Plain]:
    """A message's text; with a mark, its parts in order."""
    if not isinstance(item.content, list):
        return item.content or ""
    return content_of(
        [(_text([part], where, n), mark_of(part)) for n, part in enumerate(item.content)]
    )


def _text(content: object, where: str, first: int = 0) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a text or a list of parts.", param=where)
    for number, part in enumerate(content, first):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXTS:
            raise text_only(kind, f"{where}[{number}]")
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)


def _functions(tools: Sequence[Plain], where: str) -> Iterator[Plain]:
    """The tools in a chat's shape. A namespace's functions keep their names; the first describes
    it."""
    for number, tool in enumerate(tools):
        place, kind = f"{where}[{number}]", tool.get("type")
        if kind == "namespace" and where == "tools":
            yield from _namespace(tool, place)
            continue
        if kind != "function":
            raise Unsupported(
                f"{place} is of type {str(kind)[:40]!r}; this server runs no tools of its own, "
                "give those of type 'function'.",
                param=f"{place}.type",
            )
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        yield {"type": "function", "function": function}


def _namespace(namespace: Plain, where: str) -> Iterator[Plain]:
    functions = list(_functions(_inner(namespace), f"{where}.tools"))
    if not functions:
        raise InvalidRequest(f"{where}.tools must be a list of functions.", param=f"{where}.tools")
    first = functions[0]["function"]
    heading = f"{namespace.get('name', '')}: {namespace.get('description') or ''}"
    first["description"] = f"{heading}\n{first.get('description', '')}".strip()
    yield from functions


def _inner(namespace: Plain) -> list[Plain]:
    tools = namespace.get("tools")
    return [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []


def _chosen(choice: str | Plain | None) -> object:
    if not isinstance(choice, dict):
        return choice
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _format(given: Plain | None) -> Plain | None:
    """The format in a chat's shape, which nests the fields that are flat here."""
    if given is None or given.get("type") != "json_schema":
        return given
    schema = {name: given[name] for name in ("name", "schema", "strict") if name in given}
    return {"type": "json_schema", "json_schema": schema}
