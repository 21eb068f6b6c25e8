"""Pins, which keep blocks for reasons other than use. Operators and tenants set them.

    operator    set by the server's operator; bounded by the share that all pins may take
    cache       set by a tenant; paid by the hour if the rate card prices storage
    breakpoint  set with a request; paid with the tokens that the request wrote
    session     set for a paused conversation; ends with it

Pure. The engine thread calls with its own clock, in seconds, and carries out the answers.
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic

from tiers.blocks.keys import PrefixKey
from tiers.errors import TierError
from tiers.policy.policy import K

NO_SCOPE = PrefixKey(b"")


class PinError(TierError):
    """A pin that would exceed the share of the cache that pins may take, by `excess` blocks."""

    def __init__(self, message: str, excess: int = 0) -> None:
        super().__init__(message)
        self.excess = excess


class PinKind(StrEnum):
    """Who set a pin, and how it is paid for."""

    OPERATOR = "operator"
    CACHE = "cache"
    BREAKPOINT = "breakpoint"
    SESSION = "session"

    @property
    def gives_way(self) -> bool:
        """Whether it was set in passing, and so gives way to the same owner's later pins."""
        return self in (PinKind.BREAKPOINT, PinKind.SESSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin(Generic[K]):
    """A prefix that does not leave before `until_s`. `owner` is the tenant that set it."""

    name: str
    keys: tuple[K, ...]
    until_s: float
    since_s: float = 0.0
    scope: PrefixKey = NO_SCOPE
    num_tokens: int = 0
    why: str = ""
    owner: str = ""
    kind: PinKind = PinKind.OPERATOR


def pin_json(pin: Pin[PrefixKey]) -> dict[str, Any]:
    """A pin as routes and commands show it."""
    return {
        "name": pin.name,
        "scope": pin.scope.hex(),
        "num_tokens": pin.num_tokens,
        "num_blocks": len(pin.keys),
        "key": pin.keys[-1].hex(),
        "since_s": pin.since_s,
        "until_s": pin.until_s,
        "why": pin.why,
    }


class Pins(Generic[K]):
    """Named pins with an expiry. Invariant: the pinned blocks are at most `max_blocks`.

    Prefixes share blocks, so a block may be under several pins. Calls return the keys whose state
    changes, for the tier to hold or release. The cost of a call is proportional to its own pin's
    blocks.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._pins: dict[str, Pin[K]] = {}
        self._counts: Counter[K] = Counter()
        self._owned: dict[str, Counter[K]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._counts

    @property
    def num_blocks(self) -> int:
        return len(self._counts)

    def pins(self) -> list[Pin[K]]:
        return list(self._pins.values())

    def get(self, name: str) -> Pin[K] | None:
        return self._pins.get(name)

    def of_owner(self, owner: str) -> list[Pin[K]]:
        return [pin for pin in self._pins.values() if pin.owner == owner]

    def put(self, pin: Pin[K], most_owned: int | None = None) -> list[K]:
        """Pin a prefix, or replace the pin of that name. Returns the keys to release.

        `most_owned` bounds the blocks of a tenant. Without it, a tenant may pin as many as it
        leaves free for the others. Raises PinError if too many blocks would be pinned or if the
        name is another owner's, and then nothing has changed.
        """
        old = self._pins.get(pin.name)
        if old is not None and old.owner != pin.owner:
            raise PinError(f"the name {pin.name!r} is taken; choose another")
        before = self._drop(old) if old else []
        try:
            self._check(pin, most_owned)
        except PinError:
            if old:
                self._add(old)
            raise
        self._add(pin)
        return [key for key in before if key not in self]

    def restore(self, pin: Pin[K]) -> None:
        """Put back a pin that was just removed, before any tier was told."""
        self._add(pin)

    def unpin(self, name: str) -> list[K]:
        """Remove a pin. Returns the keys to release, the last first; none for an unknown name."""
        pin = self._pins.get(name)
        return self._drop(pin) if pin else []

    def expire(self, now_s: float) -> list[K] | None:
        """Remove the pins that have expired. Returns the keys to release, None without any."""
        over = [pin.name for pin in self._pins.values() if pin.until_s <= now_s]
        released = [key for name in over for key in self.unpin(name)]
        return [key for key in released if key not in self] if over else None

    def _check(self, pin: Pin[K], most_owned: int | None) -> None:
        keys = set(pin.keys)
        if pin.owner:
            self._check_owner(pin.owner, keys, most_owned)
        wanted = len(self._counts) + sum(key not in self._counts for key in keys)
        if wanted > self.max_blocks:
            raise PinError(
                f"pinning {len(pin.keys)} blocks as {pin.name!r} would make {wanted} pinned "
                f"blocks, and {self.max_blocks} may be; unpin something or raise the pinned share",
                wanted - self.max_blocks,
            )

    def _check_owner(self, owner: str, keys: set[K], most_owned: int | None) -> None:
        mine = self._owned.get(owner, Counter())
        owned = len(mine) + sum(key not in mine for key in keys)
        if most_owned is None:
            most_owned = (self.max_blocks - len(self._counts) + len(mine)) // 2
        if owned > most_owned:
            raise PinError(
                f"{owner!r} keeps {len(mine)} blocks, with these {owned}, and may keep "
                f"{most_owned} now; keep less, or delete a cache",
                owned - most_owned,
            )

    def _add(self, pin: Pin[K]) -> None:
        self._pins[pin.name] = pin
        keys = set(pin.keys)
        self._counts.update(keys)
        if pin.owner:
            self._owned.setdefault(pin.owner, Counter()).update(keys)

    def _drop(self, pin: Pin[K]) -> list[K]:
        """Drop a pin. Returns the keys that are now under no pin, the last of the prefix first."""
        del self._pins[pin.name]
        mine = self._owned.get(pin.owner)
        free: list[K] = []
        for key in reversed(dict.fromkeys(pin.keys)):
            if mine is not None:
                _less(mine, key)
            if _less(self._counts, key):
                free.append(key)
        if mine is not None and not mine:
            del self._owned[pin.owner]
        return free


def _less(counts: Counter[K], key: K) -> bool:
    """Decrement the count. Returns whether none is left."""
    counts[key] -= 1
    if counts[key]:
        return False
    del counts[key]
    return True
