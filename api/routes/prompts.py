"""Messages and prompts to token ids. Long texts go to the bounded thread pool, not the loop."""

import re
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import orjson

from api.collaborators import Collaborators
from api.errors import InvalidRequest, Unsupported
from api.requests.turns import TurnReplay
from api.served_model import ServedModel
from api.shapes.schemas import ChatBody
from api.shapes.template import SWITCHES, Tooling, template_arguments, tooling_of
from api.tools.history import for_template
from api.tools.reasoning import OPEN
from api.tools.steering import steered
from api.tools.style import THOUGHT_MARKERS, Style, style_of, thinks
from engine.errors import RequestError
from engine.structure import check_document

Made = TypeVar("Made")

_TAIL_TOKENS = 8  # of a prompt, enough to contain the marker of reasoning
MESSAGE_CHARS = 50  # rendering one message takes as long as tokenising this many


async def encode_text(
    wire: Collaborators, model: ServedModel, text: str, *, tenant: str
) -> "array[int]":
    """Token ids of a text. Raises ContextLengthExceeded before reading a text that is too long."""
    model.check_chars(len(text), "prompt")
    return await _encode(wire, tenant, len(text), lambda: model.tokenizer.encode(text))


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

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that the answer's reader needs as text."""
        calls = self.tooling.may_call or self.style is Style.HARMONY
        thought = THOUGHT_MARKERS if self.thinks else ()
        return (*(self.style.markers if calls else ()), *thought)


def chat_prompt(wire: Collaborators, model: ServedModel, body: ChatBody) -> ChatPrompt:
    """The input of the model's template, within its bounds.

    Raises what is wrong with the messages, tools or arguments, by field: InvalidRequest,
    InvalidParameter for calls nested too deeply, or ContextLengthExceeded.
    """
    template = model.tokenizer.chat_template
    if not model.tokenizer.has_chat_template:
        raise Unsupported(
            f"The model '{model.name}' has no chat template; use /v1/completions.",
            param="messages",
        )
    tooling = tooling_of(body)
    last = body.messages[-1]
    continues = bool(body.continue_final_message or last.prefix or last.partial)
    if continues and (body.add_generation_prompt or last.role != "assistant"):
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant, and no "
            "add_generation_prompt.",
            param="continue_final_message",
        )
    messages = [message.for_template(number) for number, message in enumerate(body.messages)]
    style, arguments = style_of(template), template_arguments(body, template)
    if continues and any(arguments.get(name) for name in SWITCHES):
        raise InvalidRequest(
            "thinking comes before an answer, and the last message has begun one; turn it off.",
            param="thinking",
        )
    plain = steered(messages, partial(_shown, model, style))
    for number, each in enumerate(plain):
        if calls := each.get("tool_calls"):
            check_document(calls, f"messages[{number}].tool_calls")
    tools = [tool.for_template() for tool in tooling.tools]
    more = [one for one in (tools, arguments) if one]
    num_chars = sum(map(_size, plain)) + sum(len(orjson.dumps(one)) for one in more)
    model.check_chars(num_chars, "messages")
    return ChatPrompt(
        messages=plain,
        tooling=tooling,
        style=style,
        thinks=thinks(template),
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        arguments=arguments,
        offered_tools=tools,
        num_chars=num_chars,
    )


def _shown(model: ServedModel, style: Style, messages: Sequence[Mapping[str, Any]]) -> str:
    """The messages as the model's template renders them. Raises RequestError if it does not."""
    plain, _ = for_template(messages, (), model.tokenizer.chat_template, style)
    return model.tokenizer.render(plain)


async def encoded_chat(
    wire: Collaborators, model: ServedModel, body: ChatBody, *, tenant: str
) -> "array[int]":
    """The tokens of a chat's body. Raises like `chat_prompt` and `encode_chat`."""
    return await encode_chat(wire, model, chat_prompt(wire, model, body), tenant=tenant)


async def encode_chat(
    wire: Collaborators,
    model: ServedModel,
    prompt: ChatPrompt,
    *,
    tenant: str,
    replay: TurnReplay | None = None,
) -> "array[int]":
    """The tokens of a chat as the model's template renders it. With `replay`, the replayed tokens
    and the template's rendering of the rest, if the rest can be determined."""

    def work() -> "array[int]":
        if replay is not None and (after := _after(model, prompt, replay)) is not None:
            return after
        apart = uuid.uuid4().hex
        return _tokens(model, _rendered(model, prompt, prompt.messages, apart), apart)

    size = prompt.num_chars + MESSAGE_CHARS * len(prompt.messages)
    return await _encode(wire, tenant, size, work)


def ends_thinking(model: ServedModel, prompt: ChatPrompt, tokens: "array[int]") -> bool:
    """Whether the prompt ends inside reasoning, so that the answer begins with it."""
    if not prompt.thinks:
        return False
    tail = b"".join(model.tokenizer.token_bytes(token) for token in tokens[-_TAIL_TOKENS:])
    return tail.rstrip().endswith(OPEN.encode())


def _rendered(
    model: ServedModel, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]], apart: str
) -> str:
    """The chat as text, with `apart` inside each control token that the client wrote, such as
    `<|im_end|>`. What stands apart is encoded as text, so no content can forge a turn."""
    tokenizer = model.tokenizer
    written = (tokenizer.token_bytes(token).decode() for token in tokenizer.special_token_ids)
    names = sorted({*written} - {""}, key=lambda name: (-len(name), name))
    control = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def safe(value: Any) -> Any:
        match value:
            case str():
                return control.sub(lambda found: found[0][:1] + apart + found[0][1:], value)
            case dict():
                return {safe(name): safe(each) for name, each in value.items()}
            case list():
                return [safe(each) for each in value]
        return value

    template = model.tokenizer.chat_template
    plain, shown_tools = for_template(messages, prompt.tooling.tools, template, prompt.style)
    return tokenizer.render(
        safe(plain),
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        tools=safe(shown_tools),
        template_arguments=safe(dict(prompt.arguments)),
    )


def _tokens(model: ServedModel, text: str, apart: str) -> "array[int]":
    """The tokens of a chat's text, whose parts between `apart` share none."""
    tokens = array("i")
    for part in text.split(apart):
        tokens += model.tokenizer.encode(part, add_special_tokens=False)
    return tokens


def _after(model: ServedModel, prompt: ChatPrompt, replay: TurnReplay) -> "array[int] | None":
    """The replayed tokens, and what the template renders after the answer at their end.

    None if that cannot be determined: the template rejects a placeholder for the answer, or does
    not render it exactly once.
    """
    stand_in, apart = uuid.uuid4().hex, uuid.uuid4().hex
    messages = list(prompt.messages)
    messages[replay.place] = {"role": "assistant", "content": stand_in}
    try:
        text = _rendered(model, prompt, messages, apart)
    except RequestError:
        return None
    if text.count(stand_in) != 1:
        return None
    tail = replay.rest + text.partition(stand_in)[2]
    return replay.tokens + _tokens(model, tail, apart)


async def encode_prompt(
    wire: Collaborators, model: ServedModel, prompt: str | list[int], *, tenant: str
) -> "array[int]":
    """A completion's prompt: a text, or token ids of the model's vocabulary."""
    if isinstance(prompt, str):
        return await encode_text(wire, model, prompt, tenant=tenant)
    if (highest := max(prompt)) >= model.vocab_size or min(prompt) < 0:
        raise InvalidRequest(
            f"prompt has a token id outside 0..{model.vocab_size - 1} (highest: {highest}); "
            "use the ids that /tokenize gives for this model.",
            param="prompt",
        )
    return array("i", prompt)


def _size(message: Mapping[str, Any]) -> int:
    """The number of characters that a template may render for a message."""
    return sum(len(v) if isinstance(v, str) else len(orjson.dumps(v)) for v in message.values())


async def _encode(wire: Collaborators, tenant: str, size: int, work: Callable[[], Made]) -> Made:
    if size <= wire.settings.inline_encode_chars:
        return work()
    return await wire.inference.encoders.run(tenant, work)
