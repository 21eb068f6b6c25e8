"""Messages and prompts to token ids. Long texts go to the bounded thread pool, not the loop."""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from api.collaborators import Collaborators, ServedModel
from api.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from api.schemas import Message

Made = TypeVar("Made")


async def encode_text(wire: Collaborators, model: ServedModel, text: str) -> "array[int]":
    return await _encode(wire, len(text), lambda: model.tokenizer.encode(text))


async def encode_chat(
    wire: Collaborators,
    model: ServedModel,
    messages: Sequence[Message],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> "array[int]":
    """The chat as the model's template writes it. Raises Unsupported where there is none."""
    if not model.tokenizer.has_chat_template:
        raise Unsupported(
            f"The model '{model.name}' has no chat template; use /v1/completions.",
            param="messages",
        )
    plain = [message.for_template(number) for number, message in enumerate(messages)]
    size = sum(len(message["content"]) for message in plain)
    return await _encode(
        wire,
        size,
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


async def _encode(wire: Collaborators, size: int, work: Callable[[], Made]) -> Made:
    if size <= wire.settings.inline_encode_chars:
        return work()
    return await asyncio.get_running_loop().run_in_executor(wire.encoders, work)
