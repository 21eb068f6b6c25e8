"""`Idempotency-Key`: the same key and body get the first answer again, without a new charge.

Answers are kept for 24 hours by tenant and key. api calls `begin` before it reserves, then `finish`
with the answer, or `abandon` if the request failed. Each call is a short blocking transaction: not
for the event loop.

A server that dies leaves claims behind. Its next run recognises them by their `boot`, another
server by their age and hold. A retry then starts again and pays once: if the dead request was
charged, that charge is refunded when the retry is charged.
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
GRACE_NS = 30 * NS  # time to reserve before a first request counts as crashed


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """The answer of the first request."""

    request_id: str
    status: int
    response: bytes


@dataclass(frozen=True, slots=True)
class Claimed:
    """The new request owns the key. `lost` is a dead request that had it and whose answer is
    lost."""

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
    ) -> FirstAnswer | Claimed:
        """Claims a key for `request_id`, or returns the stored answer.

        Raises `IdempotencyConflict` for another body and `IdempotencyBusy` while the first request
        runs. `fingerprint` is the request's own (`RequestContext`), under which a lost answer is
        recorded.
        """
        digest = hashlib.sha256(body).hexdigest()
        now_ns = self._clock_ns()

        claim = {
            "tenant": tenant,
            "key": key,
            "body_digest": digest,
            "request_id": request_id,
            "expires_ns": now_ns + KEPT_NS,
            "owner": self._owner,
            "boot": self._boot,
        }

        def operation(connection: Connection) -> FirstAnswer | Claimed:
            lost = None
            rows.purge(connection, now_ns)
            while not rows.insert(self._store, connection, claim):
                standing = self._standing(connection, tenant, key, digest, now_ns)
                if isinstance(standing, FirstAnswer):
                    return standing
                lost = standing or lost
            if lost and fingerprint:
                store_undelivered.note(connection, (tenant, fingerprint), lost, now_ns)
            return Claimed(lost)

        return self._store.retrying(operation)

    def _standing(
        self, connection: Connection, tenant: str, key: str, digest: str, now_ns: int
    ) -> FirstAnswer | str | None:
        """The stored answer, or the id of a dead first request, whose claim is removed."""
        row = rows.find(connection, tenant, key)
        if row is None:
            return None
        if row["body_digest"] != digest:
            raise IdempotencyConflict(
                f"the idempotency key {key!r} was used with another body; use a new key"
            )
        if row["status"] is not None:
            return FirstAnswer(row["request_id"], row["status"], row["response"])
        if not self._is_dead(row, now_ns) or rows.is_held(connection, tenant, row["request_id"]):
            raise IdempotencyBusy(
                f"the first request with idempotency key {key!r} is still running; try again "
                "shortly"
            )
        rows.remove(connection, tenant, key, row["request_id"])  # its server died
        return str(row["request_id"])

    def _is_dead(self, row: Any, now_ns: int) -> bool:
        """Whether the owner of a claim without a hold is gone."""
        ours_before = row["owner"] == self._owner and row["boot"] != self._boot
        return bool(ours_before or now_ns - (row["expires_ns"] - KEPT_NS) >= GRACE_NS)

    def finish(self, tenant: str, key: str, request_id: str, status: int, response: bytes) -> None:
        """Stores the answer for retries."""
        self._store.retrying(
            lambda connection: rows.finish(connection, tenant, request_id, key, status, response)
        )

    def abandon(self, tenant: str, key: str, request_id: str) -> None:
        """Releases the claim of a request without an answer. The next request with its key starts
        again."""
        self._store.retrying(lambda connection: rows.remove(connection, tenant, key, request_id))
