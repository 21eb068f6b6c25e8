"""What every route does first: find its collaborators and identify the principal.

`RequestLog` gathers the fields of the request's one log line. The outermost middleware opens and
writes it, and each step adds its part. No part of a prompt, an answer or a key goes in.
"""

import hashlib
import re
import time
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

from fastapi import Request

from api.access.auth import require
from api.access.local import check_local
from api.access.overload import check_any
from api.collaborators import Collaborators
from api.headers import FIT_NAME, ClientNames, names_of
from api.shapes.body import BodyType, parse
from api.shapes.schemas import LabelledBody
from billing.gate.holds import RequestContext
from billing.keys import Principal, Scope

USER_CHARS, TAG_CHARS, TAG_VALUE_CHARS, TAGS_MOST = 256, 64, 512, 16  # the ledger's bounds


@dataclass(slots=True)
class RequestLog:
    """The fields of one request's log line."""

    request_id: str
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, **facts: Any) -> None:
        self.facts.update(facts)


def wire_of(request: Request) -> Collaborators:
    return cast(Collaborators, request.app.state.wire)


def request_log_of(request: Request) -> RequestLog:
    return cast(RequestLog, request.state.request_log)


@dataclass(frozen=True, slots=True)
class Arrival:
    """An authorised request whose body has been read."""

    request: Request
    wire: Collaborators
    log: RequestLog
    principal: Principal
    raw: bytes
    names: ClientNames = field(default_factory=ClientNames)


async def arrive(
    request: Request, kind: type[BodyType], *, queues: bool = False
) -> tuple[Arrival, BodyType]:
    """Authorises, reads and parses a request. Raises like `received` and `parse`."""
    arrival = await received(request, queues=queues)
    return arrival, parse(arrival.raw, kind)


async def received(request: Request, *, queues: bool = False) -> Arrival:
    """Authorises and reads a request. With `queues` it is refused before it is read if it would
    wait too long for the engine. Raises like `authorised`, and QueueTooLong."""
    wire, log = wire_of(request), request_log_of(request)
    principal, names = await _identified(request, Scope.INFERENCE)
    if queues:
        check_any(wire.inference.queues, principal.tenant)
    # `Request.body` would keep it in memory until the answer has ended.
    raw = b"".join([part async for part in request.stream()])
    return Arrival(request, wire, log, principal, raw, names)


def request_context(arrival: Arrival, body: LabelledBody) -> RequestContext:
    """The caller and the request's labels, as the ledger stores them.

    The fingerprint distinguishes a retry from a new request. A retry has the same body, API key and
    Idempotency-Key, or comes from a client library that sends x-stainless-retry-count.
    """
    request, principal, names = arrival.request, arrival.principal, arrival.names
    key = names.idempotency_key
    asked = f"{principal.tenant}\0{principal.key_id}\0{request.scope['path']}\0{key}\0".encode()
    retries = request.headers.get("x-stainless-retry-count", "")
    return RequestContext(
        project=principal.project,
        key_id=principal.key_id,
        session=names.session if FIT_NAME.fullmatch(names.session) else "",
        user=_label(body.user_id or body.user or body.safety_identifier, USER_CHARS),
        tags=_tags(body.metadata),
        service_tier=_label(body.service_tier, USER_CHARS),
        fingerprint=hashlib.blake2b(asked + arrival.raw, digest_size=16).hexdigest(),
        is_retry=key is not None or re.fullmatch(r"0*[1-9][0-9]*", retries) is not None,
    )


def _tags(metadata: object) -> tuple[tuple[str, str], ...]:
    """The pairs of a request's `metadata` that the ledger stores, within OpenAI's bounds."""
    if not isinstance(metadata, dict):
        return ()
    pairs = ((_label(k, TAG_CHARS), _label(v, TAG_VALUE_CHARS)) for k, v in metadata.items())
    return tuple(sorted((k, v) for k, v in islice(pairs, TAGS_MOST) if k and v))


def _label(text: object, most: int) -> str:
    """A label from the client; empty if it is no text, too long or not printable."""
    is_label = isinstance(text, str) and len(text) <= most and text.isprintable()
    return str(text) if is_label else ""


async def authorised(request: Request, scope: Scope = Scope.INFERENCE) -> Principal:
    """The principal, checked for `scope`.

    Raises MissingKey, MissingScope and UnknownKey; ForeignPage if no key is needed.
    """
    principal, _ = await _identified(request, scope)
    return principal


async def _identified(request: Request, scope: Scope) -> tuple[Principal, ClientNames]:
    wire, names = wire_of(request), names_of(request)
    principal = await wire.access.gatekeeper.identify(names.authorization)
    request_log_of(request).add(
        tenant=principal.tenant, project=principal.project or None, key_id=principal.key_id or None
    )
    if not principal.key_id:
        check_local(request, wire.settings.cors_origins)
    require(principal, scope)
    return principal, names
