"""What every route does first: find its collaborators and identify the principal.

`RequestLog` gathers the fields of the request's one log line. The outermost middleware opens and
writes it, and each step adds its part. No part of a prompt, an answer or a key goes in.
"""

import time
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi import Request

from api.access.auth import require
from api.access.local import check_local
from api.collaborators import Collaborators
from api.errors import InvalidRequest
from api.headers import single_header
from billing.keys import Principal, Scope


@dataclass(slots=True)
class RequestLog:
    """The fields of one request's log line."""

    request_id: str
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def client_id(self) -> str:
        """The client's own id for the request, if any."""
        return self.facts.get("client_request_id") or ""

    def add(self, **facts: Any) -> None:
        self.facts.update(facts)


def wire_of(request: Request) -> Collaborators:
    return cast(Collaborators, request.app.state.wire)


def request_log_of(request: Request) -> RequestLog:
    return cast(RequestLog, request.state.request_log)


async def read_body(request: Request) -> bytes:
    """The whole body. `Request.body` would keep it in memory until the answer has ended."""
    return b"".join([part async for part in request.stream()])


def _credentials(request: Request) -> str | None:
    """The Authorization header, or Anthropic's x-api-key as one.

    Raises InvalidRequest if both are given and differ.
    """
    bearer, key = single_header(request, "Authorization"), single_header(request, "x-api-key")
    if key is None:
        return bearer
    if bearer is not None and bearer != f"Bearer {key}":
        raise InvalidRequest("Authorization and x-api-key name two keys; send one of them.")
    return f"Bearer {key}"


async def authorised(request: Request, scope: Scope = Scope.INFERENCE) -> Principal:
    """The principal, checked for `scope`.

    Raises MissingKey, MissingScope and UnknownKey; ForeignPage if no key is needed.
    """
    wire = wire_of(request)
    principal = await wire.access.gatekeeper.identify(_credentials(request))
    if not principal.key_id:
        check_local(request, wire.settings.cors_origins)
    request_log_of(request).add(
        tenant=principal.tenant, project=principal.project or None, key_id=principal.key_id or None
    )
    require(principal, scope)
    return principal
