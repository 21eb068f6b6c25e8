"""Belady's MIN: evicts the block whose next use is furthest away. The upper limit, for replays
only.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal
1966. With blocks of one size, and if a block may leave at once, no policy has more hits. Among
blocks never used again, or next used by the same request, the deepest goes first.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic

from tiers.policy.policy import K, Use

_NEVER = 1 << 60


def future_uses(chains: Iterable[Sequence[K]]) -> Mapping[K, list[int]]:
    """The numbers of the requests that use each key, latest first."""
    uses: defaultdict[K, list[int]] = defaultdict(list)
    for number, chain in enumerate(chains):
        for key in chain:
            uses[key].append(number)
    for numbers in uses.values():
        numbers.reverse()
    return uses


class Belady(Generic[K]):
    """O(log n) a call. Consumes `uses`. A new `Use` object means the next request."""

    def __init__(self, uses: Mapping[K, list[int]]) -> None:
        self._uses = uses
        self._number = -1  # of the current request
        self._use: Use | None = None
        self._resident: dict[K, tuple[int, int]] = {}  # key -> (-next use, -depth); held absent
        self._depths: dict[K, int] = {}
        self._heap: list[tuple[int, int, int, K]] = []  # (-next use, -depth, serial, key)
        self._serial = 0

    def insert(self, key: K, use: Use, parent: K | None = None, depth: int = 0) -> None:
        self._depths[key] = depth
        self.release(key, use)

    def hold(self, key: K) -> None:
        del self._resident[key]

    def release(self, key: K, use: Use) -> None:
        if use is not self._use:
            self._use = use
            self._number += 1
        numbers = self._uses[key]
        while numbers and numbers[-1] <= self._number:
            numbers.pop()
        order = (-(numbers[-1] if numbers else _NEVER), -self._depths[key])
        self._resident[key] = order
        self._serial += 1
        heapq.heappush(self._heap, (*order, self._serial, key))

    def touch(self, key: K, use: Use) -> None:
        self.release(key, use)

    def remove(self, key: K) -> None:
        self._resident.pop(key, None)
        self._depths.pop(key, None)

    def victim(self) -> K | None:
        while self._heap:
            next_use, depth, _, key = heapq.heappop(self._heap)
            if self._resident.get(key) == (next_use, depth):
                self.remove(key)
                return key
        return None

    def coldest(self, count: int) -> list[K]:
        current = {item[3]: item for item in self._heap if self._resident.get(item[3]) == item[:2]}
        return [item[3] for item in heapq.nsmallest(count, current.values())]
