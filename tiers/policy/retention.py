"""How long blocks stay for reasons other than use: the pins that an operator sets.

Pure; the engine thread calls with its own clock, in seconds, and does what the answers say.
"""

from dataclasses import dataclass
from typing import Generic

from tiers.blocks.keys import PrefixKey
from tiers.errors import TierError
from tiers.policy.policy import K

NO_SCOPE = PrefixKey(b"")


class PinError(TierError):
    """A pin that would exceed the share of the cache that may be pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin(Generic[K]):
    """A prefix that does not leave before `until_s`."""

    name: str
    keys: tuple[K, ...]
    until_s: float
    since_s: float = 0.0
    scope: PrefixKey = NO_SCOPE
    num_tokens: int = 0
    why: str = ""


class Pins(Generic[K]):
    """Named pins with an expiry. Invariant: the pinned blocks are at most `max_blocks`.

    Prefixes share blocks, so a block may be under several pins; what is returned are the keys whose
    state changes, to be held or released by the tier.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._pins: dict[str, Pin[K]] = {}
        self._counts: dict[K, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._counts

    @property
    def num_blocks(self) -> int:
        return len(self._counts)

    def keys(self) -> list[K]:
        """Every pinned block, once."""
        return list(self._counts)

    def pins(self) -> list[Pin[K]]:
        return list(self._pins.values())

    def put(self, pin: Pin[K]) -> tuple[list[K], list[K]]:
        """Pin a prefix, or replace the pin of that name: (keys to hold, keys to release).

        Raises PinError and changes nothing where too many blocks would be pinned.
        """
        old = self._pins.get(pin.name)
        replaced = set(old.keys) if old else set()
        kept = {key for key, count in self._counts.items() if count > (key in replaced)}
        wanted = kept | set(pin.keys)
        if len(wanted) > self.max_blocks:
            raise PinError(
                f"pinning {len(pin.keys)} blocks as {pin.name!r} would make {len(wanted)} pinned "
                f"blocks, and {self.max_blocks} may be; unpin something or raise the pinned share"
            )
        before = set(self._counts)
        if old:
            self._drop(old)
        self._pins[pin.name] = pin
        for key in set(pin.keys):
            self._counts[key] = self._counts.get(key, 0) + 1
        held = [key for key in dict.fromkeys(pin.keys) if key not in before]
        return held, [key for key in before if key not in self._counts]

    def unpin(self, name: str) -> list[K]:
        """Take a pin away: the keys to release. An unknown name has none."""
        pin = self._pins.pop(name, None)
        return self._drop(pin) if pin else []

    def expire(self, now_s: float) -> list[K] | None:
        """Take away the pins whose time is over: the keys to release; None where none was."""
        over = [pin.name for pin in self._pins.values() if pin.until_s <= now_s]
        return [key for name in over for key in self.unpin(name)] if over else None

    def _drop(self, pin: Pin[K]) -> list[K]:
        free: list[K] = []
        for key in set(pin.keys):
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                free.append(key)
        return free
