"""What every route does first: find its collaborators, know the principal, read the body in bounds.

`Story` gathers what the request's one log line says; the outermost middleware opens it and writes
it, and every hand on the way adds its part. Nothing of a prompt, an answer or a key goes in.
"""

import re
import time
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi import Request

from api.auth import require
from api.collaborators import Collaborators
from api.errors import BodyTooLarge
from billing.keys import Principal, Scope

FIT_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,128}")  # what of a client's own names is kept


@dataclass(slots=True)
class Story:
    """One request's log line in the making. `deferred` is set while a delivery runs."""

    request_id: str
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def client_id(self) -> str:
        """The id that the client gave the request, if it did."""
        return self.facts.get("client_request_id") or ""

    def add(self, **facts: Any) -> None:
        self.facts.update(facts)


def wire_of(request: Request) -> Collaborators:
    return cast(Collaborators, request.app.state.wire)


def story_of(request: Request) -> Story:
    return cast(Story, request.state.story)


async def authorised(request: Request, scope: Scope = Scope.INFERENCE) -> Principal:
    """The principal, who may do `scope`. Raises MissingKey, MissingScope, UnknownKey."""
    gatekeeper = wire_of(request).gatekeeper
    principal = await gatekeeper.identify(request.headers.get("authorization"))
    story_of(request).add(
        tenant=principal.tenant, project=principal.project or None, key_id=principal.key_id or None
    )
    require(principal, scope)
    return principal


async def read_body(request: Request) -> bytes:
    """The whole body, at most `max_body_bytes`; a longer one is refused as soon as it is known."""
    limit = wire_of(request).settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    received = bytearray()
    async for piece in request.stream():
        received += piece
        if len(received) > limit:
            raise _too_large(limit)
    return bytes(received)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The body is larger than {limit} bytes; send less, or raise api.max_body_bytes.",
        headers={"Connection": "close"},
    )
