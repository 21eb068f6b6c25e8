"""Turns and responses that outlive the server: a store of named bodies, each with its owner.

Names are digests under the tenant's salt, so that nobody finds another's. `cachesvc.server` has the
file; `NOTHING` is a server that keeps nothing. Event loop only.
"""

from typing import Protocol

import xxhash


class KeptBodies(Protocol):
    """Bounded by bytes and age; what it loses it does not find, and nothing fails."""

    def __contains__(self, name: object) -> bool: ...

    async def read(self, name: bytes) -> bytes | None: ...

    def write(self, name: bytes, owner: bytes, body: bytes) -> None: ...

    def delete(self, name: bytes) -> None: ...

    def forget(self, owner: bytes) -> None:
        """Remove all that one owner has; see `owner_of`."""
        ...


def owner_of(salt: bytes) -> bytes:
    """Whose a body is: a digest of the tenant's or the sharing group's salt."""
    return xxhash.xxh3_128_digest(b"owner\0" + salt)


class _Nothing:
    def __contains__(self, name: object) -> bool:
        return False

    async def read(self, name: bytes) -> bytes | None:
        return None

    def write(self, name: bytes, owner: bytes, body: bytes) -> None:
        """It is not kept."""

    def delete(self, name: bytes) -> None:
        """It was not kept."""

    def forget(self, owner: bytes) -> None:
        """Nobody has anything."""


NOTHING: KeptBodies = _Nothing()
