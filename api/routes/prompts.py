"""Messages and prompts to token ids. Long texts go to the bounded thread pool, not the loop."""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson

from api.collaborators import Collaborators, ServedModel
from api.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from api.shapes.schemas import Message
from engine.structure import check_document

Made = TypeVar("Made")

MESSAGE_CHARS = 50  # a template takes as long for a message as the tokenizer for so many


async def encode_text(wire: Collaborators, model: ServedModel, text: str) -> "array[int]":
    """Raises ContextLengthExceeded for a text that is too long before it is looked at."""
    _check_length(model, len(text), "prompt")
    return await _encode(wire, len(text), lambda: model.tokenizer.encode(text))


async def encode_chat(
    wire: Collaborators,
    model: ServedModel,
    messages: Sequence[Message],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> "array[int]":
    """The chat as the model's template writes it.

    Raises Unsupported where there is none, InvalidParameter for tools nested without measure, and
    ContextLengthExceeded as `encode_text`.
    """
    if not model.tokenizer.has_chat_template:
        raise Unsupported(
            f"The model '{model.name}' has no chat template; use /v1/completions.",
            param="messages",
        )
    plain = [message.for_template(number) for number, message in enumerate(messages)]
    check_document(tools, "tools")
    for number, message in enumerate(plain):
        check_document(message.get("tool_calls"), f"messages[{number}].tool_calls")
    size = sum(map(_size, plain)) + (len(orjson.dumps(tools)) if tools else 0)
    _check_length(model, size, "messages")
    return await _encode(
        wire,
        size + MESSAGE_CHARS * len(plain),
        lambda: model.tokenizer.chat(
            plain, add_generation_prompt=add_generation_prompt, tools=tools or None
        ),
    )


async def encode_prompt(
    wire: Collaborators, model: ServedModel, prompt: str | list[int]
) -> "array[int]":
    """A completion's prompt: text, or ids that must be the model's."""
    if isinstance(prompt, str):
        return await encode_text(wire, model, prompt)
    if (highest := max(prompt)) >= model.vocab_size or min(prompt) < 0:
        raise InvalidRequest(
            f"prompt has a token id outside 0..{model.vocab_size - 1} (highest: {highest}); "
            "use the ids that /tokenize gives for this model.",
            param="prompt",
        )
    return array("i", prompt)


def room_for_answer(
    model: ServedModel, prompt_tokens: int, max_tokens: int | None, param: str
) -> int:
    """How many tokens an answer may have. Raises ContextLengthExceeded with the numbers."""
    room = model.max_context - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"This model's context is {model.max_context} tokens; the prompt has {prompt_tokens} "
            "and leaves no room for an answer. Shorten the prompt.",
            param=param,
        )
    if max_tokens is not None and max_tokens > room:
        raise ContextLengthExceeded(
            f"This model's context is {model.max_context} tokens; the prompt has {prompt_tokens} "
            f"and {max_tokens} were asked for the answer. Shorten the prompt, or ask for at most "
            f"{room} tokens.",
            param=param,
        )
    return room if max_tokens is None else max_tokens


def _size(message: Mapping[str, Any]) -> int:
    """Characters that a template may write of a message."""
    return sum(len(v) if isinstance(v, str) else len(orjson.dumps(v)) for v in message.values())


def _check_length(model: ServedModel, num_chars: int, param: str) -> None:
    if num_chars > model.max_chars:
        raise ContextLengthExceeded(
            f"This model's context is {model.max_context} tokens; the prompt has {num_chars} "
            f"characters, and more than {model.max_chars} never fit. Shorten the prompt.",
            param=param,
        )


async def _encode(wire: Collaborators, size: int, work: Callable[[], Made]) -> Made:
    if size <= wire.settings.inline_encode_chars:
        return work()
    return await asyncio.get_running_loop().run_in_executor(wire.encoders, work)
