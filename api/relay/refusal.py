"""What a client is told of an endpoint that refuses its request.

What is wrong with the body is told in the endpoint's words. Its other words go to the log only.
"""

import re
from typing import Any

import orjson

from api.errors import ApiError, BodyTooLarge, ContextLengthExceeded, InvalidRequest
from engine.errors import RemoteFault
from engine.remote.client import OF_THE_BODY, HttpAnswer

_WORDS = 500
_TOO_LONG = re.compile("context.{0,20}length|prompt is too long|exceed.{0,20}context", re.I)


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
        error: Any = orjson.loads(data)
    except orjson.JSONDecodeError:
        return "", ""
    code = ""
    while not isinstance(error, str):
        if isinstance(error, list) and error:  # Gemini's one error, or FastAPI's for each field
            error = error[0]
        if not isinstance(error, dict):
            return "", code
        code = str(error.get("code") or code)
        names, where = ("error", "message", "detail", "msg"), error.get("loc")
        error = next((error[name] for name in names if error.get(name)), None)
        if isinstance(where, list) and isinstance(error, str):
            error = f"{'.'.join(map(str, where))}: {error}"
    return error, code
