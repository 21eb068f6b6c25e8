"""Stored responses, which clients can read or continue until newer ones need the space.

Names are made with the tenant's salt, so tenants are separate. The latest are in memory, and all
are in `kept`. Event loop only.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from api.requests.kept import NOTHING, KeptBodies, owner_of

MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Kept:
    """A response, its input items, and the whole chat up to it."""

    response: dict[str, Any]
    items: Sequence[dict[str, Any]]
    messages: Sequence[dict[str, Any]]


class StoredResponses:
    """At most `max_bytes` in memory; the least recently used leave first. `salt` is a tenant's."""

    def __init__(self, max_bytes: int = MAX_BYTES, kept: KeptBodies = NOTHING) -> None:
        self._max_bytes = max_bytes
        self._kept = kept
        self._bodies: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()  # owner, body
        self.num_bytes = 0

    def put(self, salt: bytes, kept: Kept) -> None:
        name, owner = _name(salt, kept.response["id"]), owner_of(salt)
        body = orjson.dumps([kept.response, kept.items, kept.messages])
        self._remember(name, owner, body)
        self._kept.write(name, owner, body)

    async def get(self, salt: bytes, response_id: str) -> Kept | None:
        name = _name(salt, response_id)
        found = self._bodies.get(name)
        if found is not None:
            self._bodies.move_to_end(name)
            return Kept(*orjson.loads(found[1]))
        body = await self._kept.read(name)
        if body is None:
            return None
        try:
            kept = Kept(*orjson.loads(body))
        except (ValueError, TypeError):  # written by another version
            return None
        self._remember(name, owner_of(salt), body)
        return kept

    def delete(self, salt: bytes, response_id: str) -> None:
        name = _name(salt, response_id)
        self._drop(name)
        self._kept.delete(name)

    def forget(self, owner: bytes) -> None:
        """Remove the responses of one owner, here and on disk."""
        for name in [name for name, (other, _) in self._bodies.items() if other == owner]:
            self._drop(name)
        self._kept.forget(owner)

    def _remember(self, name: bytes, owner: bytes, body: bytes) -> None:
        self._drop(name)
        self._bodies[name] = owner, body
        self.num_bytes += len(body)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._bodies)))

    def _drop(self, name: bytes) -> None:
        found = self._bodies.pop(name, None)
        if found is not None:
            self.num_bytes -= len(found[1])


def _name(salt: bytes, response_id: str) -> bytes:
    return xxhash.xxh3_128_digest(b"response\0" + salt + response_id.encode())
