"""Messages and prompts to token ids. Long texts go to the bounded thread pool, not the loop."""

import re
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson

from api.collaborators import Collaborators
from api.errors import ContextLengthExceeded, InvalidRequest
from api.requests.turns import TurnReplay
from api.served_model import ServedModel
from api.shapes.images import ImageAsked, picture_of
from api.shapes.tooling import Tooling
from api.tools.history import for_template
from api.tools.style import Style
from engine.errors import RequestError
from engine.request import Picture
from engine.structure import check_document
from tiers.blocks.contents import Content

Made = TypeVar("Made")

MESSAGE_CHARS = 50  # rendering one message takes as long as tokenising this many


async def encode_text(
    wire: Collaborators, model: ServedModel, text: str, *, tenant: str
) -> "array[int]":
    """Token ids of a text. Raises ContextLengthExceeded before reading a text that is too long."""
    _check_length(model, len(text), "prompt")
    return await _encode(wire, tenant, len(text), lambda: model.tokenizer.encode(text))


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt in tokens, and the images behind some of them."""

    tokens: "array[int]"
    contents: tuple[Content, ...] = ()
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """The input of a chat template. `messages` are as the client sent them, in plain values."""

    messages: Sequence[Mapping[str, Any]]
    tooling: Tooling
    style: Style
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[ImageAsked] = ()  # of its messages, in order

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        return [tool.for_template() for tool in self.tooling.tools]


async def encode_chat(
    wire: Collaborators,
    model: ServedModel,
    prompt: ChatPrompt,
    *,
    tenant: str,
    replay: TurnReplay | None = None,
) -> Encoded:
    """The tokens of a chat as the model's template renders it. With `replay`, the replayed tokens
    and the template's rendering of the rest, if the rest can be determined.

    Raises InvalidParameter for calls nested too deeply, InvalidRequest or Unsupported for an image,
    and ContextLengthExceeded like `encode_text`.
    """
    for number, message in enumerate(prompt.messages):
        check_document(message.get("tool_calls"), f"messages[{number}].tool_calls")
    tools = prompt.offered_tools
    size = sum(map(_size, prompt.messages))
    size += sum(len(orjson.dumps(one)) for one in (tools, prompt.arguments) if one)
    _check_length(model, size, "messages")

    def work() -> Encoded:
        if prompt.images:
            return _seen(model, prompt, wire.settings.image_dir)
        if replay is not None and (after := _after(model, prompt, replay)) is not None:
            return Encoded(after)
        apart = uuid.uuid4().hex
        return Encoded(_tokens(model, _rendered(model, prompt, prompt.messages, apart), apart))

    if prompt.images:  # read and decoded off the event loop, however short the text
        return await wire.inference.encoders.run(tenant, work)
    return await _encode(wire, tenant, size + MESSAGE_CHARS * len(prompt.messages), work)


def _seen(model: ServedModel, prompt: ChatPrompt, folder: Path | None) -> Encoded:
    """A chat with images. Raises InvalidRequest, Unsupported or ContextLengthExceeded."""
    reader = model.images
    assert reader is not None
    pictures = tuple(picture_of(model, asked, folder) for asked in prompt.images)
    num_tokens = sum(picture.num_tiles for picture in pictures) * reader.tile_tokens
    if num_tokens > model.max_context:
        raise ContextLengthExceeded(
            f"{_too_long(model, num_tokens)} Its images alone make as many; send fewer, or smaller "
            "ones.",
            param="messages",
        )
    apart = uuid.uuid4().hex
    text = _rendered(model, prompt, prompt.messages, apart)
    if text.count(reader.mark) != len(pictures):
        raise InvalidRequest(
            f"The chat shows {len(pictures)} images, and its text says {reader.mark}, which "
            "stands for one; leave that out of the text.",
            param="messages",
        )
    tokens = _tokens(model, reader.expanded(text, pictures), apart)
    return Encoded(tokens, reader.contents(tokens, pictures), pictures)


def _rendered(
    model: ServedModel, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]], apart: str
) -> str:
    """The chat as text, with `apart` inside each control token that the client wrote, such as
    `<|im_end|>`. What stands apart is encoded as text, so no content can forge a turn."""
    tokenizer = model.tokenizer
    written = (tokenizer.token_bytes(token).decode() for token in tokenizer.special_token_ids)
    image = model.images.mark if model.images is not None else ""  # refused in a text
    names = sorted({*written} - {"", image}, key=lambda name: (-len(name), name))
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


def room_for_answer(
    model: ServedModel,
    prompt_tokens: int,
    max_tokens: int | None,
    *,
    prompt: str,
    limit: str = "max_tokens",
) -> int:
    """The maximum of answer tokens. `prompt` and `limit` name the fields for the error.

    Raises ContextLengthExceeded with the numbers.
    """
    room = model.max_context - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"{_too_long(model, prompt_tokens)} Shorten the prompt.", param=prompt
        )
    if max_tokens is not None and max_tokens > room:
        raise ContextLengthExceeded(
            f"input length and `{limit}` exceed context limit: {prompt_tokens} + {max_tokens} > "
            f"{model.max_context}, the model's maximum context length. Shorten the prompt, or set "
            f"{limit} to {room} at most.",
            param=limit,
        )
    return room if max_tokens is None else max_tokens


def _size(message: Mapping[str, Any]) -> int:
    """The number of characters that a template may render for a message."""
    return sum(len(v) if isinstance(v, str) else len(orjson.dumps(v)) for v in message.values())


def _check_length(model: ServedModel, num_chars: int, param: str) -> None:
    if num_chars > model.max_chars:
        at_least = num_chars * model.max_context // model.max_chars
        raise ContextLengthExceeded(
            f"{_too_long(model, at_least)} It has {num_chars} characters, which are as many tokens "
            "or more. Shorten the prompt.",
            param=param,
        )


def _too_long(model: ServedModel, num_tokens: int) -> str:
    """In the words that clients of both protocols look for. One token is left for the answer."""
    return (
        f"prompt is too long: {num_tokens} tokens > {model.max_context - 1} maximum; the model's "
        f"maximum context length is {model.max_context} tokens."
    )


async def _encode(wire: Collaborators, tenant: str, size: int, work: Callable[[], Made]) -> Made:
    if size <= wire.settings.inline_encode_chars:
        return work()
    return await wire.inference.encoders.run(tenant, work)
