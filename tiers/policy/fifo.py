"""First in, first out: a cache that ignores use. A baseline for replays."""

from collections import OrderedDict
from typing import Generic

from tiers.policy.held import HeldSet
from tiers.policy.policy import K, Use


class Fifo(Generic[K]):
    """Evicts the block inserted longest ago. Using a block changes nothing."""

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()  # oldest first; parked blocks absent
        self._held: HeldSet[K] = HeldSet()

    def insert(self, key: K, use: Use, parent: K | None = None, depth: int = 0) -> None:
        self._order[key] = None

    def hold(self, key: K) -> None:
        self._held.hold(key)

    def release(self, key: K, use: Use) -> None:
        if self._held.release(key):  # it was parked as the oldest, so it still is
            self._order[key] = None
            self._order.move_to_end(key, last=False)

    def touch(self, key: K, use: Use) -> None:
        pass

    def remove(self, key: K) -> None:
        self._held.discard(key)
        self._order.pop(key, None)

    def victim(self) -> K | None:
        while self._order:
            key, _ = self._order.popitem(last=False)
            if key not in self._held:
                return key
            self._held.park(key)
        return None

    def coldest(self, count: int) -> list[K]:
        found: list[K] = []
        for key in self._order:
            if len(found) >= count:
                break
            if key not in self._held:
                found.append(key)
        return found
