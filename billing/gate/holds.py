"""Holds: money reserved for a running request, as a lease. Values shared by api, gate and store."""

from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from billing.gate.entries import canonical
from billing.gate.limits import Checked
from billing.prices.book import PinnedRate, RateRef
from billing.usage import EMPTY, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """The caller's labels, for statements and retries. Texts may be empty.

    `fingerprint` is a digest of key and body. `is_retry` says that the client may have sent the
    same request before; it pays once.
    """

    project: str = ""
    key_id: str = ""
    session: str = ""
    user: str = ""  # the client's own user
    tags: tuple[tuple[str, str], ...] = ()  # the request's `metadata`
    service_tier: str = ""  # as requested; if the card has a factor for it, the price names it
    fingerprint: str = ""
    is_retry: bool = False
    admitted_ns: int = 0


@dataclass(frozen=True, slots=True)
class Hold:
    """The server's copy of a reserved request, enough to settle it even if the row is gone."""

    tenant: str
    request_id: str
    pinned: PinnedRate
    context: RequestContext = field(default_factory=RequestContext)

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant, self.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredHold:
    """A stored hold, from which a request is settled after a crash.

    `usage` is the last recorded progress. `owner` and `boot` identify the server and its run.
    """

    tenant: str
    request_id: str
    amount: int
    expires_ns: int
    owner: str
    boot: str
    body: str  # for the future charge: rate reference and context
    usage: Usage = EMPTY
    checked: Checked | None = field(default=None, compare=False)  # None: no limit counts it

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant, self.request_id


def request_body(ref: RateRef, context: RequestContext) -> dict[str, Any]:
    """The price and caller in an entry's body."""
    return {
        "card": ref.card,
        "version": ref.version,
        "model": ref.model,
        "window": ref.window,
        "project": context.project,
        "key": context.key_id,
        "session": context.session,
        "user": context.user,
        "tags": dict(context.tags),
        "fingerprint": context.fingerprint,
        "retry": context.is_retry,
        "admitted_ns": context.admitted_ns,
    }


def encode_request(hold: Hold) -> str:
    return canonical(request_body(hold.pinned.ref, hold.context))


def decode_request(body: str) -> tuple[RateRef, RequestContext]:
    """The rate reference and context from a body by `encode_request`."""
    data = orjson.loads(body)
    return rate_ref(data), RequestContext(
        project=data.get("project", ""),
        key_id=data.get("key", ""),
        session=data.get("session", ""),
        user=data.get("user", ""),
        tags=tuple(data.get("tags", {}).items()),
        fingerprint=data.get("fingerprint", ""),
        is_retry=data.get("retry", False),
        admitted_ns=data.get("admitted_ns", 0),
    )


def rate_ref(data: dict[str, Any]) -> RateRef:
    """The rate reference in an entry's body."""
    return RateRef(data["card"], data["version"], data["model"], data["window"])


def answered(hold: StoredHold) -> StoredHold:
    """The hold of a request whose answer has meanwhile been delivered by a retry."""
    return replace(hold, body=canonical(orjson.loads(hold.body) | {"answered": True}))


def is_answered(hold: StoredHold) -> bool:
    return "answered" in orjson.loads(hold.body)
