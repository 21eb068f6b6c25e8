"""Stored responses, which clients can read or continue until newer ones need the space.

Names are made with the tenant's salt, so tenants are separate. The latest are in memory, and all
are in `kept`. Event loop only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from api.requests.kept import NOTHING, KeptBodies, RecentBodies, owner_of

MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, its input items, and the whole chat up to it."""

    response: dict[str, Any]
    items: Sequence[dict[str, Any]]
    messages: Sequence[dict[str, Any]]


class StoredResponses:
    """At most `max_bytes` in memory; the least recently used leave first. `salt` is a tenant's."""

    def __init__(self, max_bytes: int = MAX_BYTES, kept: KeptBodies = NOTHING) -> None:
        self._bodies = RecentBodies(max_bytes, kept)

    @property
    def num_bytes(self) -> int:
        return self._bodies.num_bytes

    def put(self, salt: bytes, kept: KeptResponse) -> None:
        body = orjson.dumps([kept.response, kept.items, kept.messages])
        self._bodies.put(_name(salt, kept.response["id"]), owner_of(salt), body)

    async def get(self, salt: bytes, response_id: str) -> KeptResponse | None:
        body = await self._bodies.get(_name(salt, response_id), owner_of(salt))
        if body is None:
            return None
        try:
            return KeptResponse(*orjson.loads(body))
        except (ValueError, TypeError):  # written by another version
            return None

    def delete(self, salt: bytes, response_id: str) -> None:
        self._bodies.delete(_name(salt, response_id))

    def forget(self, owner: bytes) -> None:
        """Remove the responses of one owner, here and on disk."""
        self._bodies.forget(owner)


def _name(salt: bytes, response_id: str) -> bytes:
    return xxhash.xxh3_128_digest(b"response\0" + salt + response_id.encode())
