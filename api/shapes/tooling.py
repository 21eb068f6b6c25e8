"""The tools of a chat, checked, and whether the model must call one."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from api.errors import InvalidRequest, Unsupported
from api.shapes.schemas import ChatBody
from api.tools.choice import Tool, ToolChoice
from engine.structure import check_document

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tooling:
    """The tools in the prompt, and whether the model may call them.

    They are in the prompt even if `tool_choice` is none. A prompt with tools in one turn and
    without them in the next would diverge at its beginning, and the whole conversation would miss.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    strict: bool = False
    may_call: bool = False

    @property
    def callable_names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools if self.may_call)


def tooling_of(body: ChatBody) -> Tooling:
    """The tools of a body. Raises InvalidRequest or Unsupported, by field."""
    given = body.tools or []
    if given:
        check_document(given, "tools")
    tools = tuple(_tool(number, one) for number, one in enumerate(given))
    if len({tool.name for tool in tools}) != len(tools):
        raise InvalidRequest("Two tools have one name; give each its own.", param="tools")
    choice = _choice(body, tools)
    strict = any(one["function"].get("strict") is True for one in given)
    may_call = bool(tools) and body.tool_choice != "none"
    return Tooling(tools, choice, strict, may_call)


def _tool(number: int, given: Mapping[str, Any]) -> Tool:
    where = f"tools[{number}]"
    if given.get("type", "function") != "function":
        raise Unsupported(
            f"{where} is of type {str(given['type'])[:40]!r}; this server runs no tools of its "
            "own, give those of type 'function'.",
            param=f"{where}.type",
        )
    function = given.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{where} has no object 'function'.", param=f"{where}.function")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.function.name must be 1 to 128 letters, digits or . _ : -.",
            param=f"{where}.function.name",
        )
    if schema is not None and not isinstance(schema, Mapping):
        raise InvalidRequest(
            f"{where}.function.parameters must be a JSON schema, which is an object.",
            param=f"{where}.function.parameters",
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(
            f"{where}.function.description must be a text.",
            param=f"{where}.function.description",
        )
    return Tool(name, description or "", schema)


def _choice(body: ChatBody, tools: Sequence[Tool]) -> ToolChoice:
    asked, several = body.tool_choice, body.parallel_tool_calls is True
    if asked in (None, "auto", "none"):
        return ToolChoice(several=body.parallel_tool_calls is not False)
    if not tools:
        raise InvalidRequest("tool_choice needs tools; give some.", param="tool_choice")
    if asked == "required":
        return ToolChoice(forced=True, several=several)
    name = _named(asked)
    if name is None:
        raise InvalidRequest(
            "tool_choice must be 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": "..."}}.',
            param="tool_choice",
        )
    if name not in {tool.name for tool in tools}:
        raise InvalidRequest(
            f"tool_choice names {name[:80]!r}, which is not one of the tools.", param="tool_choice"
        )
    return ToolChoice(forced=True, name=name)


def _named(asked: object) -> str | None:
    if not isinstance(asked, Mapping) or asked.get("type", "function") != "function":
        return None
    function = asked.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
