"""What a chat gives its template: messages, tools and arguments, checked.

The arguments are `chat_template_kwargs`, `thinking` and `reasoning_effort`. One is refused if the
template does not read it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import orjson

from api.errors import InvalidRequest, Unsupported
from api.served_model import ServedModel
from api.shapes.schemas import ChatBody
from api.tools.choice import Tool, ToolChoice
from api.tools.history import for_template
from api.tools.steering import steered
from api.tools.style import THOUGHT_MARKERS, Style, style_of, thinks
from engine.structure import check_document

SWITCHES: Final = ("enable_thinking", "thinking")  # names used by templates
_TAKEN: Final = frozenset(  # set by the server or the renderer
    """messages conversation tools documents chat_template add_generation_prompt tokenize padding
    continue_final_message truncation max_length return_tensors return_dict tokenizer_kwargs
    return_assistant_tokens_mask processor_kwargs template_kwargs""".split()  # noqa: SIM905  a word list
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """The input of a chat template. `messages` are as the client sent them, in plain values."""

    messages: Sequence[Mapping[str, Any]]
    tooling: Tooling
    style: Style
    thinks: bool = False  # the template has reasoning
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    offered_tools: Sequence[dict[str, Any]] = ()  # as templates read them
    num_chars: int = 0  # that a template may render of it
    markers: tuple[str, ...] = ()  # special tokens that the answer's reader needs as text


def chat_prompt(model: ServedModel, body: ChatBody) -> ChatPrompt:
    """The input of the model's template, within its bounds.

    Raises what is wrong with the messages, tools or arguments, by field: InvalidRequest,
    InvalidParameter for calls nested too deeply, or ContextLengthExceeded.
    """
    template = model.tokenizer.chat_template
    if not model.tokenizer.has_chat_template:
        raise Unsupported(
            f"The model '{model.name}' has no chat template; use /v1/completions.", param="messages"
        )
    arguments, tooling = _arguments(body, template), _tooling(body)
    last = body.messages[-1]
    continues = bool(body.continue_final_message or last.prefix or last.partial)
    if continues and (body.add_generation_prompt or last.role != "assistant"):
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant, and no "
            "add_generation_prompt.",
            param="continue_final_message",
        )
    if continues and any(arguments.get(name) for name in SWITCHES):
        raise InvalidRequest(
            "thinking comes before an answer, and the last message has begun one; turn it off.",
            param="thinking",
        )
    messages = [message.for_template(number) for number, message in enumerate(body.messages)]
    style, has_thoughts = style_of(template), thinks(template)
    marks_calls = tooling.may_call or style is Style.HARMONY
    plain = steered(messages, partial(_shown, model, style))
    for number, each in enumerate(plain):
        if calls := each.get("tool_calls"):
            check_document(calls, f"messages[{number}].tool_calls")
    tools = [tool.for_template() for tool in tooling.tools]
    told = [value for message in plain for value in message.values()]
    more = [one for one in (tools, arguments) if one]
    num_chars = sum(len(v) if isinstance(v, str) else len(orjson.dumps(v)) for v in [*told, *more])
    model.check_chars(num_chars, "messages")
    return ChatPrompt(
        messages=plain,
        tooling=tooling,
        style=style,
        thinks=has_thoughts,
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        arguments=arguments,
        offered_tools=tools,
        num_chars=num_chars,
        markers=(
            *(style.markers if marks_calls else ()),
            *(THOUGHT_MARKERS if has_thoughts else ()),
        ),
    )


def _shown(model: ServedModel, style: Style, messages: Sequence[Mapping[str, Any]]) -> str:
    """The messages as the model's template renders them. Raises RequestError if it does not."""
    plain, _ = for_template(messages, (), model.tokenizer.chat_template, style)
    return model.tokenizer.render(plain)


def _tooling(body: ChatBody) -> Tooling:
    given = [each.function for each in body.tools or []]
    tools = tuple(Tool(each.name, each.description or "", each.parameters) for each in given)
    if len({tool.name for tool in tools}) != len(tools):
        raise InvalidRequest("Two tools have one name; give each its own.", param="tools")
    choice, strict = _choice(body, tools), any(each.strict for each in given)
    may_call = bool(tools) and body.tool_choice != "none"
    check_document([each.parameters for each in given], "tools")
    return Tooling(tools, choice, strict, may_call)


def _choice(body: ChatBody, tools: Sequence[Tool]) -> ToolChoice:
    several = body.parallel_tool_calls
    match body.tool_choice:
        case None | "auto" | "none":
            return ToolChoice(several=several is not False)
        case _ if not tools:
            raise InvalidRequest("tool_choice needs tools; give some.", param="tool_choice")
        case "required":
            return ToolChoice(forced=True, several=several is True)
        case {"function": {"name": str(name)}, **more} if more.get("type") in (None, "function"):
            if name not in {tool.name for tool in tools}:
                raise InvalidRequest(
                    f"tool_choice names {name[:80]!r}, which is not one of the tools.",
                    param="tool_choice",
                )
            return ToolChoice(forced=True, name=name)
    raise InvalidRequest(
        "tool_choice must be 'auto', 'none', 'required' or "
        '{"type": "function", "function": {"name": "..."}}.',
        param="tool_choice",
    )


def _arguments(body: ChatBody, template: str | None) -> dict[str, Any]:
    given = dict(body.chat_template_kwargs or {})
    if given:
        check_document(given, "chat_template_kwargs")
    for name, value in given.items():
        _check(name, value, template or "")
    given |= _thinking(body, template) | _effort(body, template)
    return {name: value for name, value in given.items() if _reads(template, name)}


def fitting_thinking(
    thinking: Mapping[str, Any] | None, template: str | None
) -> Mapping[str, Any] | None:
    """`thinking`, if the template has a switch; agents send it to every model alike."""
    can = any(_reads(template, name) for name in SWITCHES)
    return dict(thinking) if thinking is not None and can else None


def _check(name: str, value: object, template: str) -> None:
    where = f"chat_template_kwargs.{name[:80]}"
    if name in _TAKEN or not name.isidentifier():
        raise InvalidRequest(f"{where} cannot be set by a request; leave it out.", param=where)
    if not _reads(template, name) and not (name in SWITCHES and not value):
        raise Unsupported(
            f"The model's chat template does not read '{name[:80]}'; leave it out.", param=where
        )


def _thinking(body: ChatBody, template: str | None) -> dict[str, Any]:
    if body.thinking is None and body.enable_thinking is None:
        return {}
    enabled = _enabled(body.thinking) if body.thinking else bool(body.enable_thinking)
    switch = next((name for name in SWITCHES if _reads(template, name)), None)
    if switch is not None:
        return {switch: enabled}
    if enabled != thinks(template):
        does = "does not think" if enabled else "always thinks"
        raise Unsupported(f"This model {does}; leave out thinking.", param="thinking")
    return {}


def _enabled(thinking: Mapping[str, Any]) -> bool:
    if thinking.get("type") not in ("enabled", "disabled", "adaptive"):
        raise InvalidRequest(
            "thinking.type must be 'enabled', 'disabled' or 'adaptive'.", param="thinking.type"
        )
    return bool(thinking["type"] != "disabled")


def _effort(body: ChatBody, template: str | None) -> dict[str, Any]:
    """A hint, passed if the template reads it. `none` turns thinking off if there is a switch."""
    if body.reasoning_effort is None:
        return {}
    if _reads(template, "reasoning_effort"):
        return {"reasoning_effort": body.reasoning_effort}
    if body.reasoning_effort == "none" and body.thinking is None:
        return {name: False for name in SWITCHES if _reads(template, name)}
    return {}


def _reads(template: str | None, name: str) -> bool:
    return re.search(rf"(?<![\w.'\"]){re.escape(name)}(?![\w'\"])", template or "") is not None
