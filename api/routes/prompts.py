"""Messages and prompts to token ids. Long texts go to the bounded thread pool, not the loop."""

import re
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from api.collaborators import Collaborators
from api.errors import InvalidRequest
from api.requests.turns import TurnReplay
from api.served_model import ServedModel
from api.shapes.schemas import ChatBody
from api.shapes.template import ChatPrompt, chat_prompt
from api.tools.history import for_template
from api.tools.reasoning import OPEN
from engine.errors import RequestError

Made = TypeVar("Made")

_TAIL_TOKENS = 8  # of a prompt, enough to contain the marker of reasoning
MESSAGE_CHARS = 50  # rendering one message takes as long as tokenising this many


async def encoded_chat(
    wire: Collaborators, model: ServedModel, body: ChatBody, *, tenant: str
) -> "array[int]":
    """The tokens of a chat's body. Raises like `chat_prompt` and `encode_chat`."""
    return await encode_chat(wire, model, chat_prompt(model, body), tenant=tenant)


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
    """The ids of a text, or of token ids of the model's vocabulary. Raises ContextLengthExceeded
    before reading a text that is too long."""
    if isinstance(prompt, str):
        model.check_chars(len(prompt), "prompt")
        return await _encode(wire, tenant, len(prompt), lambda: model.tokenizer.encode(prompt))
    if (worst := max(prompt)) >= model.vocab_size or (worst := min(prompt)) < 0:
        raise InvalidRequest(
            f"prompt has the token id {worst}, outside 0..{model.vocab_size - 1}; "
            "use the ids that /tokenize gives for this model.",
            param="prompt",
        )
    return array("i", prompt)


async def _encode(wire: Collaborators, tenant: str, size: int, work: Callable[[], Made]) -> Made:
    if size <= wire.settings.inline_encode_chars:
        return work()
    return await wire.inference.encoders.run(tenant, work)
