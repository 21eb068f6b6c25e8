"""What a client is told of an endpoint that refuses its request.

What is wrong with the body is told in the endpoint's words. Its other words go to the log only.
"""

import re
from typing import Any, Final

import orjson

from api.errors import ApiError, BodyTooLarge, ContextLengthExceeded, InvalidRequest
from engine.errors import RemoteFault
from engine.remote.client import OF_THE_BODY, HttpAnswer

MAX_REFUSAL_BYTES: Final = 1 << 16
_WORDS = 500
_TOO_LONG = re.compile(
    "context.{0,20}length|prompt is too long|exceed.{0,20}context", re.IGNORECASE
)


def refusal_of(answer: HttpAnswer, said: bytes) -> ApiError | RemoteFault:
    """The error that a client gets for an answer that is none."""
    fault = answer.asked.refusal(answer, said)
    if answer.status == 413:
        return BodyTooLarge("The body is larger than the engine takes.")
    if answer.status not in OF_THE_BODY:
        return fault
    words, code = _words(said)
    shown = "".join(c for c in answer.asked.keyless(words)[:_WORDS] if c.isprintable())
    told = f"The engine refused this request: {shown or 'it gave no reason'}"
    is_long = code == "context_length_exceeded" or _TOO_LONG.search(words)
    return ContextLengthExceeded(told) if is_long else InvalidRequest(told)


def _words(data: bytes) -> tuple[str, str]:
    """Message and code of an error in any protocol's shape."""
    try:
        document: Any = orjson.loads(data)
    except orjson.JSONDecodeError:
        return "", ""
    error = document.get("error", document) if isinstance(document, dict) else document
    if isinstance(error, str):
        return error, ""
    if not isinstance(error, dict):
        return "", ""
    message = error.get("message") or error.get("detail") or ""
    return message if isinstance(message, str) else "", str(error.get("code") or "")
