"""The tools of a chat, checked, and whether the model must call one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from api.errors import InvalidRequest
from api.shapes.schemas import ChatBody
from api.tools.choice import Tool, ToolChoice
from engine.structure import check_document


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
    """The tools of a body. Raises InvalidRequest."""
    given = [each.function for each in body.tools or []]
    check_document([each.parameters for each in given], "tools")
    tools = tuple(Tool(each.name, each.description or "", each.parameters) for each in given)
    if len({tool.name for tool in tools}) != len(tools):
        raise InvalidRequest("Two tools have one name; give each its own.", param="tools")
    choice = _choice(body, tools)
    may_call = bool(tools) and body.tool_choice != "none"
    return Tooling(tools, choice, any(each.strict for each in given), may_call)


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
