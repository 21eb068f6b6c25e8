"""`Idempotency-Key`: the same key and body get the first answer again and pay once.

A claim is taken before any work. The answer is stored after settlement and before its last bytes
are sent, so a retry finds either the answer or a running request. A request that ends without an
answer releases its claim, and the next one with the key starts again.
"""

import asyncio
import logging
from dataclasses import dataclass

from starlette.responses import Response

from api.errors import InvalidRequest
from api.headers import EVENT_STREAM, FIT_NAME, IDEMPOTENCY_KEY
from api.job import Job
from billing.errors import BillingError
from billing.idempotency import FirstAnswer, Idempotency
from billing.keys import Principal

logger = logging.getLogger(__name__)

REPLAYED = "Idempotent-Replayed"


@dataclass(slots=True)
class KeyClaim:
    """One request's claim on its key. Ends with a stored answer or abandoned."""

    store: Idempotency
    tenant: str
    key: str
    request_id: str
    kept: bool = False

    async def keep(self, answer: bytes) -> None:
        """Stores the whole answer. If the store fails, only the replay is lost."""
        try:
            await asyncio.to_thread(
                self.store.finish, self.tenant, self.key, self.request_id, 200, answer
            )
            self.kept = True
        except BillingError:
            logger.warning("request %s: its answer was not kept", self.request_id, exc_info=True)

    async def close(self) -> None:
        if not self.kept:
            await asyncio.to_thread(self.store.abandon, self.tenant, self.key, self.request_id)


async def claim(
    store: Idempotency, key: str | None, asked: tuple[str, bytes], principal: Principal, job: Job
) -> KeyClaim | FirstAnswer | None:
    """The claim of a request with a key, or the stored answer; None without a key. `asked` are the
    path and the body.

    Raises InvalidRequest, IdempotencyConflict or IdempotencyBusy.
    """
    if key is None:
        return None
    if not FIT_NAME.fullmatch(key):
        raise InvalidRequest(f"{IDEMPOTENCY_KEY} must be 1 to 128 letters, digits or . _ : @ -.")
    body, fingerprint = asked[0].encode() + b"\0" + asked[1], job.context.fingerprint
    begun = await asyncio.to_thread(
        store.begin, principal.tenant, key, body, job.request_id, fingerprint=fingerprint
    )
    if isinstance(begun, FirstAnswer):
        return begun
    return KeyClaim(store, principal.tenant, key, job.request_id)


def replayed(replay: FirstAnswer, *, stream: bool) -> Response:
    """The first answer again, byte for byte."""
    kind = EVENT_STREAM if stream else "application/json"
    return Response(replay.response, replay.status, {REPLAYED: "true"}, kind)
