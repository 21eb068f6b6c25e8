"""The protocols of clients as they pass: where a request goes, and what an event of the answer is.

An event or a body goes on as it came. Only its counts, its end and its errors are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from api.errors import ErrorAnswer
from api.headers import event
from api.job import Asked, Bill, Delta, Served
from api.shapes.answer import WireFormat
from api.shapes.messages_format import anthropic_error

_ENDINGS = ("message_delta", "message_stop", "response.completed", "response.incomplete")
_ENDS = ("finish_reason", "stop_reason", "status")
_CUT = ("length", "max_tokens", "model_context_window_exceeded", "incomplete")  # of these
_LAST = ("message_stop", "response.completed", "response.incomplete")


@dataclass(frozen=True, slots=True)
class EventNote:
    """What an event tells. `num_bytes` of text are as many tokens at most."""

    num_bytes: int = 0
    num_texts: int = 0  # tokens at least: the choices with new text
    finished: frozenset[str] = frozenset()  # choices
    is_ending: bool = False  # it belongs to the end of the answer
    is_last: bool = False
    is_error: bool = False
    is_bare_usage: bool = False  # it has a usage and nothing else


def note_of(document: Mapping[str, Any]) -> EventNote:
    kind, choices = document.get("type"), document.get("choices")
    if is_error(document):
        return EventNote(is_error=True)
    if not isinstance(choices, list):
        delta = document.get("delta")
        size = text_bytes(delta) if kind != "message_delta" else 0
        return EventNote(size, int(size > 0), is_ending=kind in _ENDINGS, is_last=kind in _LAST)
    each = [choice for choice in choices if isinstance(choice, dict)]
    sizes = [text_bytes(one.get("delta")) + text_bytes(one.get("text")) for one in each]
    return EventNote(
        sum(sizes),
        sum(size > 0 for size in sizes),
        frozenset(str(one.get("index", 0)) for one in each if one.get("finish_reason")),
        is_bare_usage=isinstance(document.get("usage"), dict)
        and not any(one.get(name) for one in each for name in ("delta", "text", "finish_reason")),
    )


def is_cut(document: Mapping[str, Any]) -> bool:
    """Whether an answer, in an event or a body, ends at its limit."""
    choices = document.get("choices")
    each = [document, document.get("delta"), document.get("response")]
    each += choices if isinstance(choices, list) else ()
    told = [one.get(name) for one in each if isinstance(one, Mapping) for name in _ENDS]
    return any(one in _CUT for one in told)


def is_error(document: Mapping[str, Any]) -> bool:
    kinds = (document.get("type"), document.get("object"))  # the second is vLLM's
    return bool(document.get("error")) or "error" in kinds or "response.failed" in kinds


ANSWERS: Final = ("choices", "content", "output")  # where protocols have the text of an answer
# Of a delta or an answer: no tokens, or those of the text once more.
_NAMES = frozenset({"role", "type", "id", "index", "call_id", "status", "object", "finish_reason"})
_NAMES |= {"logprobs", "prompt_logprobs", "signature", "encrypted_content"}


def text_bytes(value: object) -> int:
    """The bytes of all text in a delta or an answer."""
    match value:
        case str():
            return len(value.encode(errors="replace"))
        case Mapping():
            return sum(text_bytes(each) for name, each in value.items() if name not in _NAMES)
        case list():
            return sum(map(text_bytes, value))
    return 0


def answer_bytes(document: Mapping[str, Any]) -> int:
    """The bytes of text in an answer that came whole."""
    return sum(text_bytes(document.get(name)) for name in ANSWERS)


class PassedFormat(WireFormat):
    """An answer as it came."""

    _body = b""

    def chunk(self, delta: Delta) -> bytes:
        return delta.raw

    def absorb(self, delta: Delta) -> None:
        self._body = delta.raw

    def body(self, served: Served, bill: Bill, asked: Asked) -> Any:
        return orjson.Fragment(self._body)


class _PassedMessage(PassedFormat):
    def error(self, answer: ErrorAnswer) -> bytes:
        return event(anthropic_error(answer), "error")

    def refusal(self, answer: ErrorAnswer) -> Mapping[str, Any]:
        return anthropic_error(answer)


class _PassedResponse(PassedFormat):
    def error(self, answer: ErrorAnswer) -> bytes:
        told = {"code": answer.code, "message": answer.message, "param": answer.param}
        return event({"type": "error", **told}, "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProtocol:
    """One protocol."""

    path: str
    answer: type[PassedFormat] = PassedFormat
    is_messages: bool = False
    keeps_answers: bool = False  # for later requests, unless it is told not to
    asks_for_usage: bool = False  # a stream has none unless it is asked for
    limits: tuple[str, ...] = ("max_tokens",)  # of its output; others are ignored


CHAT: Final = ClientProtocol(
    path="/v1/chat/completions", asks_for_usage=True, limits=("max_tokens", "max_completion_tokens")
)
COMPLETIONS: Final = ClientProtocol(path="/v1/completions", asks_for_usage=True)
MESSAGES: Final = ClientProtocol(path="/v1/messages", answer=_PassedMessage, is_messages=True)
RESPONSES: Final = ClientProtocol(
    path="/v1/responses", answer=_PassedResponse, keeps_answers=True, limits=("max_output_tokens",)
)
