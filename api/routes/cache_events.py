"""GET /v1/cache/events: block events, as server-sent events.

For routers that send a prompt to the server with its prefix, and for people who watch. A key with
the admin scope sees every tenant's blocks. Any other key sees those of its own tenant and its
sharing groups.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.access.auth import EVERYONE
from api.cache.feeds import FeedResponse, Filter
from api.collaborators import Collaborators
from api.context import authorised, wire_of
from api.errors import InvalidRequest
from billing.keys import Scope
from tiers.blocks.keys import PrefixKey
from tiers.telemetry.events import EventKind
from tiers.tier import TierName

Name = TypeVar("Name", bound=StrEnum)

router = APIRouter(tags=["cache"])


@router.get("/v1/cache/events")
async def cache_events(request: Request) -> Response:
    """An endless stream. `Last-Event-ID` or `after` resumes after that event."""
    wire = wire_of(request)
    principal = await authorised(request)
    scopes = None if principal.may(Scope.ADMIN) else scopes_of_tenant(wire, principal.tenant)
    return feed_for(request, principal.tenant, scopes)


def feed_for(request: Request, tenant: str, scopes: frozenset[PrefixKey] | None) -> FeedResponse:
    """The stream for a query: `tier` and `kind` (repeatable), `tokens`, `after`.

    Raises InvalidRequest and Overloaded.
    """
    wire, query = wire_of(request), request.query_params
    wanted = Filter(
        scopes=scopes,
        tiers=_named(TierName, "tier", query.getlist("tier")),
        kinds=_named(EventKind, "kind", query.getlist("kind")),
        tokens=query.get("tokens", "").lower() in ("1", "true", "yes"),
    )
    after = _number(request.headers.get("last-event-id") or query.get("after"))
    return FeedResponse(
        wire.cache.feeds,
        tenant,
        after,
        wanted,
        keepalive_s=wire.settings.keepalive_s,
        write_timeout_s=wire.settings.write_timeout_s,
    )


def _named(kind: type[Name], param: str, given: Iterable[str]) -> frozenset[Name]:
    """The named members of `kind`, or all if none is named."""
    try:
        return frozenset(kind(name) for name in given) or frozenset(kind)
    except ValueError as error:
        known = ", ".join(kind)
        raise InvalidRequest(f"{error}; known: {known}.", param=param) from None


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InvalidRequest(
            f"{text[:40]!r} is not an event's id; send the last `id:` from the stream.",
            param="after",
        )
    return int(text)


def scopes_of_tenant(wire: Collaborators, tenant: str) -> frozenset[PrefixKey]:
    """The roots of every scope that the tenant's requests can use."""
    groups = [
        group
        for group, members in wire.access.salts.groups.items()
        if tenant in members or EVERYONE in members
    ]
    return frozenset(
        wire.access.salts.scoped(model.scope, tenant, share).root()
        for model in wire.inference.models.values()
        for share in (None, *groups)
    )
