"""Which tools a model can call, and the grammar that makes it call one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.tools.hermes import CLOSE, OPEN
from api.tools.reasoning import CLOSE as THOUGHT_ENDS
from api.tools.style import Style
from engine.ebnf import lark_string
from engine.structure import document_rule

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


def forced_grammar(
    style: Style, tools: Sequence[Tool], choice: ToolChoice, *, thinking: bool
) -> str:
    """The grammar of an answer of calls. `thinking`: it begins inside reasoning.

    Calls in Hermes' style have their markers. In all other styles they are bare JSON, because
    markers that are special tokens are not text, which a grammar could require.
    """
    return _after_thought(_calls(style, tools, choice), thinking=thinking)


def either_grammar(
    style: Style, tools: Sequence[Tool], choice: ToolChoice, document: str, *, thinking: bool
) -> str:
    """The grammar of an answer that is either calls or the document of a rule."""
    calls = _calls(style, tools, choice, "calls")
    return _after_thought(f"answer: calls | document\ndocument: {document}\n{calls}", thinking)


def strict_grammar(style: Style, tools: Sequence[Tool], choice: ToolChoice) -> str:
    """The grammar of any text in which every call is one of `tools` with valid arguments."""
    start = "start: marked* TEXT" if choice.several else "start: marked | TEXT"
    return "\n".join(
        [
            start,
            "marked: mark call",
            f"mark[lazy]: /(?s:.*){OPEN}/",
            r"TEXT: /(?s:.*)/ & ~/(?s:.*)" + OPEN + "(?s:.*)/",
            _call(style, tools, opened=True),
        ]
    )


def _calls(style: Style, tools: Sequence[Tool], choice: ToolChoice, name: str = "answer") -> str:
    wanted = [tool for tool in tools if choice.name in (None, tool.name)]
    more = ' ("\\n" call)*' if choice.several else ""
    return f"{name}: call{more}\n{_call(style, wanted)}"


def _after_thought(rules: str, thinking: bool) -> str:
    if not thinking:
        return f"start: answer\n{rules}"
    thought = f"thought[lazy]: /(?s:.*){THOUGHT_ENDS.replace('/', chr(92) + '/')}\\n\\n/"
    return f"start: thought answer\n{thought}\n{rules}"


def _call(style: Style, tools: Sequence[Tool], *, opened: bool = False) -> str:
    """The rule `call`. `opened`: its first marker has been written."""
    key = "parameters" if style is Style.LLAMA else "arguments"
    rules = []
    for tool in tools:
        begin, end = f'{{"name": {json.dumps(tool.name)}, "{key}": ', "}"
        if style.has_text_marks:
            begin, end = f"{'' if opened else OPEN}\n{begin}", f"{end}\n{CLOSE}"
        schema = document_rule(tool.schema or _ANY_OBJECT, f"tools.{tool.name}.parameters")
        rules.append(f"{lark_string(begin)} {schema.document} {lark_string(end)}")
    return "call: " + "\n  | ".join(rules)
