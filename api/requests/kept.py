"""Turns and responses that survive a restart: a store of named bodies with owners.

Names are digests under the tenant's salt, so no tenant finds another's. `cachesvc.server` owns the
file. `NOTHING` is for a server that stores none. Event loop only.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Generic, Protocol, TypeVar

import orjson
import xxhash

Value = TypeVar("Value")


class KeptBodies(Protocol):
    """Bounded by bytes and age. A lost body is not found; it raises nothing."""

    def __contains__(self, name: object) -> bool: ...

    async def read(self, name: bytes) -> bytes | None: ...

    def write(self, name: bytes, owner: bytes, body: bytes) -> None: ...

    def delete(self, name: bytes) -> None: ...

    def forget(self, owner: bytes) -> None:
        """Find nothing of one owner any more; see `owner_of`. The file's owner erases it there."""
        ...


def owner_of(salt: bytes) -> bytes:
    """The owner of a body: a digest of the tenant's or the sharing group's salt."""
    return xxhash.xxh3_128_digest(b"owner\0" + salt)


class Purges:
    """When each owner was last purged. Of a request that arrived before, nothing is kept."""

    def __init__(self) -> None:
        self._last_ns: dict[bytes, int] = {}  # time.monotonic_ns()

    def note(self, owner: bytes) -> None:
        """Takes in that the owner is being purged now."""
        self._last_ns[owner] = time.monotonic_ns()

    def reach(self, salt: bytes, arrival_ns: int) -> bool:
        """Whether the salt's owner was purged after a request arrived."""
        return arrival_ns <= self._last_ns.get(owner_of(salt), -1)


class _Nothing:
    def __contains__(self, name: object) -> bool:
        return False

    async def read(self, name: bytes) -> bytes | None:
        return None

    def write(self, name: bytes, owner: bytes, body: bytes) -> None:
        """Does nothing."""

    def delete(self, name: bytes) -> None:
        """Does nothing."""

    def forget(self, owner: bytes) -> None:
        """Does nothing."""


NOTHING: KeptBodies = _Nothing()


class RecentBodies:
    """The latest bodies of a store in memory, at most `max_bytes`; the least recently used leave
    first."""

    def __init__(self, max_bytes: int, kept: KeptBodies) -> None:
        self._max_bytes = max_bytes
        self._kept = kept
        self._bodies: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()  # owner, body
        self.num_bytes = 0

    def put(self, name: bytes, owner: bytes, body: bytes) -> None:
        self._remember(name, owner, body)
        self._kept.write(name, owner, body)

    async def get(self, name: bytes, owner: bytes) -> bytes | None:
        found = self._bodies.get(name)
        if found is not None:
            self._bodies.move_to_end(name)
            return found[1]
        body = await self._kept.read(name)
        if body is not None:
            self._remember(name, owner, body)
        return body

    def delete(self, name: bytes) -> None:
        self._drop(name)
        self._kept.delete(name)

    def forget(self, owner: bytes) -> None:
        """Find no body of one owner any more, here or on disk."""
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


class KeptAnswers(Generic[Value]):
    """A value for each answer, found by the tenant's salt and the answer's id.

    Values are dataclasses whose fields are JSON. `make` takes the fields, and raises ValueError or
    TypeError for those that another version wrote. `what` is part of the names.
    """

    def __init__(
        self, what: str, make: Callable[..., Value], max_bytes: int, kept: KeptBodies
    ) -> None:
        self._what = what
        self._make = make
        self._bodies = RecentBodies(max_bytes, kept)

    @property
    def num_bytes(self) -> int:
        return self._bodies.num_bytes

    def put(self, salt: bytes, answer_id: str, value: Any) -> None:
        body = orjson.dumps([getattr(value, each.name) for each in fields(value)])
        self._bodies.put(self._name(salt, answer_id), owner_of(salt), body)

    async def get(self, salt: bytes, answer_id: str) -> Value | None:
        body = await self._bodies.get(self._name(salt, answer_id), owner_of(salt))
        try:
            return self._make(*orjson.loads(body)) if body is not None else None
        except (ValueError, TypeError):
            return None

    def delete(self, salt: bytes, answer_id: str) -> None:
        self._bodies.delete(self._name(salt, answer_id))

    def forget(self, owner: bytes) -> None:
        """Find no value of one owner any more, here or on disk."""
        self._bodies.forget(owner)

    def _name(self, salt: bytes, answer_id: str) -> bytes:
        return xxhash.xxh3_128_digest(f"{self._what}\0".encode() + salt + answer_id.encode())
