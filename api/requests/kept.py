"""Turns and responses that survive a restart: a store of named bodies with owners.

Names are digests under the tenant's salt, so no tenant finds another's. `cachesvc.server` owns the
file. `NOTHING` is for a server that stores none. Event loop only.
"""

from typing import Protocol

import xxhash


class KeptBodies(Protocol):
    """Bounded by bytes and age. A lost body is not found; it raises nothing."""

    def __contains__(self, name: object) -> bool: ...

    async def read(self, name: bytes) -> bytes | None: ...

    def write(self, name: bytes, owner: bytes, body: bytes) -> None: ...

    def delete(self, name: bytes) -> None: ...

    def forget(self, owner: bytes) -> None:
        """Remove everything of one owner; see `owner_of`."""
        ...


def owner_of(salt: bytes) -> bytes:
    """The owner of a body: a digest of the tenant's or the sharing group's salt."""
    return xxhash.xxh3_128_digest(b"owner\0" + salt)


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
