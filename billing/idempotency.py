"""`Idempotency-Key`: the same key and body get the first answer again, without a new charge.

Kept for 24 hours by tenant and key. api calls `begin` before it reserves, then `finish` with the
answer or `abandon` when the request failed. Each call is a short transaction and blocks: not on the
event loop.

A server that dies leaves claims behind: those of its own earlier runs it knows by their `boot`,
another server's by their age and their hold. A retry then starts again and pays once: if
the dead request was charged, that charge is given back when the new one is.
"""

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from billing.errors import IdempotencyBusy, IdempotencyConflict
from billing.prices.book import NS
from billing.store import idempotency as rows
from billing.store import undelivered as store_undelivered
from billing.store.store import Connection, LedgerStore

KEPT_NS = 24 * 3600 * NS
GRACE_NS = 30 * NS  # how long a first request may take to reserve before it counts as crashed


@dataclass(frozen=True, slots=True)
class Replay:
    """The answer of the first request."""

    request_id: str
    status: int
    response: bytes


@dataclass(frozen=True, slots=True)
class Claimed:
    """The key is the new request's own. `lost` is the dead request that had it, whose answer nobody
    got."""

    lost: str | None = None


class Idempotency:
    """Answers by key, on one store. Thread-safe. `owner` names this server, as in its holds."""

    def __init__(
        self,
        store: LedgerStore,
        *,
        owner: str = "server",
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._store = store
        self._owner = owner
        self._boot = secrets.token_hex(8)
        self._clock_ns = clock_ns

    def begin(
        self, tenant: str, key: str, body: bytes, request_id: str, *, fingerprint: str = ""
    ) -> Replay | Claimed:
        """`Claimed`: go on as `request_id`. Raises `IdempotencyConflict` for another body and
        `IdempotencyBusy` while the first request runs.

        `fingerprint` is the request's own (`RequestContext`), under which a lost answer is noted.
        """
        digest = hashlib.sha256(body).hexdigest()
        now_ns = self._clock_ns()

        def operation(connection: Connection) -> Replay | Claimed:
            lost = None
            rows.purge(connection, now_ns)
            while not rows.insert(
                self._store,
                connection,
                tenant=tenant,
                key=key,
                body_digest=digest,
                request_id=request_id,
                expires_ns=now_ns + KEPT_NS,
                owner=self._owner,
                boot=self._boot,
            ):
                standing = self._standing(connection, tenant, key, digest, now_ns)
                if isinstance(standing, Replay):
                    return standing
                lost = standing or lost
            if lost and fingerprint:
                store_undelivered.note(connection, (tenant, fingerprint), lost, now_ns)
            return Claimed(lost)

        return self._store.retrying(operation)

    def _standing(
        self, connection: Connection, tenant: str, key: str, digest: str, now_ns: int
    ) -> Replay | str | None:
        """The answer that stands, or the id of a dead first request, which is cleared away."""
        row = rows.find(connection, tenant, key)
        if row is None:
            return None
        if row["body_digest"] != digest:
            raise IdempotencyConflict(
                f"the idempotency key {key!r} was used with another body; use a new key"
            )
        if row["status"] is not None:
            return Replay(row["request_id"], row["status"], row["response"])
        if not self._is_dead(row, now_ns) or rows.is_held(connection, tenant, row["request_id"]):
            raise IdempotencyBusy(
                f"the first request with idempotency key {key!r} is still running; try again "
                "shortly"
            )
        rows.remove(connection, tenant, key, row["request_id"])  # its server died
        return str(row["request_id"])

    def _is_dead(self, row: Any, now_ns: int) -> bool:
        """Whether the owner of a claim without a hold will not come back to it."""
        ours_before = row["owner"] == self._owner and row["boot"] != self._boot
        return bool(ours_before or now_ns - (row["expires_ns"] - KEPT_NS) >= GRACE_NS)

    def finish(self, tenant: str, key: str, request_id: str, status: int, response: bytes) -> None:
        """Keep the answer for those who ask again."""
        self._store.retrying(
            lambda connection: rows.finish(connection, tenant, request_id, key, status, response)
        )

    def abandon(self, tenant: str, key: str, request_id: str) -> None:
        """Forget a request that has no answer to repeat; the next one with its key starts again."""
        self._store.retrying(lambda connection: rows.remove(connection, tenant, key, request_id))
