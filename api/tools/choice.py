"""Which tools a model can call, and the grammar that makes it call one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.tools.hermes import CLOSE, OPEN
from api.tools.reasoning import CLOSE as THOUGHT_ENDS
from api.tools.style import Style

_ANY_OBJECT: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the client runs. `schema` describes its arguments."""

    name: str
    description: str = ""
    schema: Mapping[str, Any] | None = None

    def for_template(self) -> dict[str, Any]:
        """The tool in the shape of chat templates."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.schema or _ANY_OBJECT,
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`forced`: the answer must be a call, of `name` if given."""

    forced: bool = False
    name: str | None = None
    several: bool = False  # a forced answer may contain further calls


def forced_format(
    style: Style, tools: Sequence[Tool], choice: ToolChoice, *, thinking: bool
) -> dict[str, Any]:
    """The structural tag of an answer of calls. `thinking`: it begins inside reasoning.

    Calls in Hermes' style have their markers. In all other styles they are bare JSON, because
    markers that are special tokens are not text, which a grammar could require.
    """
    return _after_thought(_calls(style, tools, choice), thinking=thinking)


def either_format(
    style: Style,
    tools: Sequence[Tool],
    choice: ToolChoice,
    schema: Mapping[str, Any],
    *,
    thinking: bool,
) -> dict[str, Any]:
    """The tag of an answer that is either calls or a document of `schema`."""
    document = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    either = {"type": "or", "elements": [_calls(style, tools, choice), document]}
    return _after_thought(either, thinking=thinking)


def strict_format(style: Style, tools: Sequence[Tool], choice: ToolChoice) -> dict[str, Any]:
    """The tag of any text in which every call is one of `tools` with valid arguments."""
    return {
        "type": "triggered_tags",
        "triggers": [OPEN],
        "tags": [_tag(style, tool) for tool in tools],
        "stop_after_first": not choice.several,
    }


def _calls(style: Style, tools: Sequence[Tool], choice: ToolChoice) -> dict[str, Any]:
    wanted = [tool for tool in tools if choice.name in (None, tool.name)]
    return {
        "type": "tags_with_separator",
        "tags": [_tag(style, tool) for tool in wanted],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not choice.several,
    }


def _after_thought(answer: dict[str, Any], *, thinking: bool) -> dict[str, Any]:
    if not thinking:
        return answer
    thought = {"type": "any_text", "excludes": [THOUGHT_ENDS]}
    ended = {"type": "const_string", "value": THOUGHT_ENDS + "\n\n"}
    return {"type": "sequence", "elements": [thought, ended, answer]}


def _tag(style: Style, tool: Tool) -> dict[str, Any]:
    key = "parameters" if style is Style.LLAMA else "arguments"
    begin, end = f'{{"name": {json.dumps(tool.name)}, "{key}": ', "}"
    if style.has_text_marks:
        begin, end = f"{OPEN}\n{begin}", f"{end}\n{CLOSE}"
    schema = {"type": "json_schema", "json_schema": tool.schema or _ANY_OBJECT}
    return {
        "type": "tag",
        "begin": begin,
        "content": {**schema, "max_whitespace_cnt": 1},
        "end": end,
    }
