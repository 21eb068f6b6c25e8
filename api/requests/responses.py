"""Stored responses, which clients can read or continue until newer ones need the space.

Names are made with the tenant's salt, so tenants are separate. The latest are in memory, and all
are in `kept`. Event loop only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from api.requests.kept import NOTHING, KeptBodies, Recent, owner_of

MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, and the whole chat up to it."""

    response: dict[str, Any]
    messages: Sequence[dict[str, Any]]


class StoredResponses:
    """At most `max_bytes` in memory; the least recently used leave first."""

    def __init__(self, max_bytes: int = MAX_BYTES, kept: KeptBodies = NOTHING) -> None:
        self._recent = Recent[bytes](max_bytes, len)
        self._kept = kept

    @property
    def num_bytes(self) -> int:
        return self._recent.weight

    def put(self, salt: bytes, answer_id: str, value: KeptResponse) -> None:
        body = orjson.dumps([value.response, value.messages])
        name, owner = _name(salt, answer_id), owner_of(salt)
        self._recent.put(name, owner, body)
        self._kept.write(name, owner, body)

    async def get(self, salt: bytes, answer_id: str) -> KeptResponse | None:
        """None for one that is not stored, or that another version wrote."""
        name = _name(salt, answer_id)
        body = self._recent.find(name)
        if body is None and (body := await self._kept.read(name)) is not None:
            self._recent.put(name, owner_of(salt), body)
        try:
            return KeptResponse(*orjson.loads(body)) if body is not None else None
        except (ValueError, TypeError):
            return None

    def delete(self, salt: bytes, answer_id: str) -> None:
        name = _name(salt, answer_id)
        self._recent.drop(name)
        self._kept.delete(name)

    def forget(self, owner: bytes) -> None:
        """Find no response of one owner any more, here or on disk."""
        self._recent.forget(owner)
        self._kept.forget(owner)


def _name(salt: bytes, answer_id: str) -> bytes:
    return xxhash.xxh3_128_digest(b"response\0" + salt + answer_id.encode())
