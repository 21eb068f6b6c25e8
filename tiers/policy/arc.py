"""ARC: one list for blocks used once, one for blocks used again. Hits on ghosts set their sizes.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4. There,
REPLACE runs while the missed key is known. Here the target moves when the key is inserted and takes
effect at the next eviction.
"""

from collections import OrderedDict
from itertools import chain, islice
from typing import Generic

from tiers.policy.policy import K, Use


class Arc(Generic[K]):
    """Evicts the oldest of `recent` while that exceeds its target, otherwise the oldest of
    `frequent`.

    Each list keeps a ghost list; together they hold at most `capacity_blocks` ghosts.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = max(1, capacity_blocks)
        self._recent: OrderedDict[K, None] = OrderedDict()  # T1, oldest first, held blocks absent
        self._frequent: OrderedDict[K, None] = OrderedDict()  # T2
        self._recent_ghosts: OrderedDict[K, None] = OrderedDict()  # B1
        self._frequent_ghosts: OrderedDict[K, None] = OrderedDict()  # B2
        self._target = 0.0  # p: the target size of `recent`

    def insert(self, key: K, use: Use, parent: K | None = None, depth: int = 0) -> None:
        recent, frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        if key in self._recent_ghosts:
            del self._recent_ghosts[key]
            self._target = min(self._capacity, self._target + max(1.0, frequent / recent))
            self._frequent[key] = None
        elif key in self._frequent_ghosts:
            del self._frequent_ghosts[key]
            self._target = max(0.0, self._target - max(1.0, recent / frequent))
            self._frequent[key] = None
        else:
            self._recent[key] = None

    def hold(self, key: K) -> None:
        self._recent.pop(key, None)
        self._frequent.pop(key, None)

    def release(self, key: K, use: Use) -> None:
        self._frequent[key] = None

    def touch(self, key: K, use: Use) -> None:
        self.hold(key)
        self.release(key, use)

    def remove(self, key: K) -> None:
        self.hold(key)

    def victim(self) -> K | None:
        if self._recent and (len(self._recent) > self._target or not self._frequent):
            key, _ = self._recent.popitem(last=False)
            self._recent_ghosts[key] = None
        elif self._frequent:
            key, _ = self._frequent.popitem(last=False)
            self._frequent_ghosts[key] = None
        else:
            return None
        self._forget_ghosts()
        return key

    def coldest(self, count: int) -> list[K]:
        surplus = max(0, len(self._recent) - int(self._target))
        order = chain(
            islice(self._recent, surplus), self._frequent, islice(self._recent, surplus, None)
        )
        return list(islice(order, count))

    def _forget_ghosts(self) -> None:
        """Bound `recent` with its ghosts to the capacity, and all ghosts together to the same."""
        if self._recent_ghosts and len(self._recent) + len(self._recent_ghosts) > self._capacity:
            self._recent_ghosts.popitem(last=False)
        elif len(self._recent_ghosts) + len(self._frequent_ghosts) > self._capacity:
            self._frequent_ghosts.popitem(last=False)
