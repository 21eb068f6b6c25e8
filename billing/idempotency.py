"""`Idempotency-Key`: the same key and body get the first answer again, without a new charge.

Kept for 24 hours by tenant and key. api calls `begin` before it reserves, then `finish` with the
answer or `abandon` when the request failed. Each call is a short transaction and blocks: not on the
event loop.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from billing import store_idempotency as rows
from billing.errors import IdempotencyBusy, IdempotencyConflict
from billing.prices import NS
from billing.store import Connection, LedgerStore

KEPT_NS = 24 * 3600 * NS
GRACE_NS = 30 * NS  # a first request is given so long to reserve before its silence means a crash


@dataclass(frozen=True, slots=True)
class Replay:
    """The answer of the first request."""

    request_id: str
    status: int
    response: bytes


class Idempotency:
    """Answers by key, on one store. Thread-safe."""

    def __init__(self, store: LedgerStore, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self._clock_ns = clock_ns

    def begin(self, tenant: str, key: str, body: bytes, request_id: str) -> Replay | None:
        """None: go on as `request_id`. Raises `IdempotencyConflict` for another body and
        `IdempotencyBusy` while the first request runs."""
        digest = hashlib.sha256(body).hexdigest()
        now_ns = self._clock_ns()

        def operation(connection: Connection) -> Replay | None:
            rows.purge(connection, now_ns)
            while not rows.insert(
                self._store,
                connection,
                tenant=tenant,
                key=key,
                body_digest=digest,
                request_id=request_id,
                expires_ns=now_ns + KEPT_NS,
            ):
                replay = self._standing(connection, tenant, key, digest, now_ns)
                if replay is not None:
                    return replay
            return None

        return self._store.retrying(operation)

    def _standing(
        self, connection: Connection, tenant: str, key: str, digest: str, now_ns: int
    ) -> Replay | None:
        """The answer that stands, or None after an abandoned first request was cleared away."""
        row = rows.find(connection, tenant, key)
        if row is None:
            return None
        if row["body_digest"] != digest:
            raise IdempotencyConflict(
                f"the idempotency key {key!r} was used with another body; use a new key"
            )
        if row["status"] is not None:
            return Replay(row["request_id"], row["status"], row["response"])
        young = now_ns - (row["expires_ns"] - KEPT_NS) < GRACE_NS
        if young or rows.is_held(connection, tenant, row["request_id"]):
            raise IdempotencyBusy(
                f"the first request with idempotency key {key!r} still runs; try again shortly"
            )
        rows.remove(connection, tenant, key, row["request_id"])  # its server died
        return None

    def finish(self, tenant: str, key: str, request_id: str, status: int, response: bytes) -> None:
        """Keep the answer for those who ask again."""
        self._store.retrying(
            lambda connection: rows.finish(connection, tenant, request_id, key, status, response)
        )

    def abandon(self, tenant: str, key: str, request_id: str) -> None:
        """Forget a request that has no answer to repeat; the next one with its key begins anew."""
        self._store.retrying(lambda connection: rows.remove(connection, tenant, key, request_id))
