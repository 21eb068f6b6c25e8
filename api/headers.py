"""Headers that several parts read or write, and the rule for client-sent names."""

import re
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import Request

from api.errors import InvalidRequest

FIT_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,128}")  # client-sent names that are kept


def single_header(request: Request, name: str) -> str | None:
    """A header that decides who pays or what is replayed, so it may occur only once."""
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise InvalidRequest(f"The header {name} was sent {len(values)} times; send it once.")
    return values[0] if values else None


EVENT_STREAM = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


def event(document: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + orjson.dumps(document) + b"\n\n"
