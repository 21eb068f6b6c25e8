"""What every route does first: find its collaborators, and know the principal.

`Story` gathers what the request's one log line says; the outermost middleware opens it and writes
it, and every hand on the way adds its part. Nothing of a prompt, an answer or a key goes in.
"""

import re
import time
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi import Request

from api.access.auth import require
from api.access.local import check_local
from api.collaborators import Collaborators
from api.errors import InvalidRequest
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


def single_header(request: Request, name: str) -> str | None:
    """A header that decides who pays or what is replayed: it must not be open to two readings."""
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise InvalidRequest(f"The header {name} was sent {len(values)} times; send it once.")
    return values[0] if values else None


async def authorised(request: Request, scope: Scope = Scope.INFERENCE) -> Principal:
    """The principal, who may do `scope`.

    Raises MissingKey, MissingScope, UnknownKey, and ForeignPage where no key is needed.
    """
    gatekeeper = wire_of(request).gatekeeper
    principal = await gatekeeper.identify(single_header(request, "Authorization"))
    if not principal.key_id:
        check_local(request)
    story_of(request).add(
        tenant=principal.tenant, project=principal.project or None, key_id=principal.key_id or None
    )
    require(principal, scope)
    return principal
