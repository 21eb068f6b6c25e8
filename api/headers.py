"""Headers that several parts read or write, and the rule for client-sent names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Request

from api.errors import InvalidRequest

IDEMPOTENCY_KEY = "Idempotency-Key"
FIT_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,128}")  # client-sent names that are kept


def single_header(request: Request, name: str) -> str | None:
    """A header that decides who pays or what is replayed, so it may occur only once."""
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise InvalidRequest(f"The header {name} was sent {len(values)} times; send it once.")
    return values[0] if values else None


@dataclass(frozen=True, slots=True)
class ClientNames:
    """What headers tell: the client's key, as an Authorization header, and its own names for a
    request and its conversation."""

    authorization: str | None = None
    idempotency_key: str | None = None
    session: str = ""
    parent_session: str = ""


def names_of(request: Request) -> ClientNames:
    """Raises InvalidRequest for a name that is sent twice, and for two keys that differ:
    Anthropic's clients send theirs as x-api-key."""
    bearer, key = single_header(request, "Authorization"), single_header(request, "x-api-key")
    if None not in (bearer, key) and bearer != f"Bearer {key}":
        raise InvalidRequest("Authorization and x-api-key name two keys; send one of them.")
    return ClientNames(
        bearer if key is None else f"Bearer {key}",
        single_header(request, IDEMPOTENCY_KEY),
        single_header(request, "X-Session-Id") or "",
        single_header(request, "X-Parent-Session-Id") or "",
    )


EVENT_STREAM = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


def event(document: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + orjson.dumps(document) + b"\n\n"
