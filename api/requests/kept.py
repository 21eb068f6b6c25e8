"""Turns and responses that survive a restart: a store of named bodies with owners.

Names are digests under the tenant's salt, so no tenant finds another's. `cachesvc.server` owns the
file. `NOTHING` stores none. Event loop only.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import xxhash

Value = TypeVar("Value")


class KeptBodies:
    """Bounded by bytes and age. A lost body is not found; it raises nothing. These keep none."""

    def __contains__(self, name: object) -> bool:
        return False

    async def read(self, name: bytes) -> bytes | None:
        return None

    def write(self, name: bytes, owner: bytes, body: bytes) -> None:
        """Keep a body of an owner; see `owner_of`."""

    def delete(self, name: bytes) -> None:
        """Find it no more."""

    def forget(self, owner: bytes) -> None:
        """Find nothing of one owner any more. The file's owner erases it there."""


NOTHING = KeptBodies()


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


class Recent(OrderedDict[bytes, tuple[bytes, Value]]):
    """An owner and a value by name, at most `most` in weight; the least recently used leave first.

    Change it by its own methods alone, so that `weight` is the sum of its values'.
    """

    def __init__(self, most: int, weigh: Callable[[Value], int]) -> None:
        super().__init__()
        self._most = most
        self._weigh = weigh
        self.weight = 0

    def find(self, name: bytes) -> Value | None:
        if name not in self:
            return None
        self.move_to_end(name)
        return self[name][1]

    def put(self, name: bytes, owner: bytes, value: Value) -> None:
        self.drop(name)
        self[name] = owner, value
        self.weight += self._weigh(value)
        while self.weight > self._most:
            self.drop(next(iter(self)))

    def drop(self, name: bytes) -> None:
        if (found := self.pop(name, None)) is not None:
            self.weight -= self._weigh(found[1])

    def forget(self, owner: bytes) -> None:
        for name in [name for name, (other, _) in self.items() if other == owner]:
            self.drop(name)
