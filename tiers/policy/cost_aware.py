"""Cost-aware: evicts the block whose recomputation is worth least for the bytes it takes.

Greedy-Dual-Size-Frequency (Cherkasova, HPL-98-69R1, 1998): a block's priority is the inflation `L`
at its last use plus uses x cost / bytes; `L` is the priority of the last victim, so that what is no
longer used sinks. Ours differs in one thing: only leaves are candidates, since a child without its
parent cannot be served.
"""

import heapq
from collections import defaultdict
from typing import Generic

from tiers.policy.policy import K, Use

_Item = tuple[float, int, K]  # priority when pushed, serial, key


class _Entry(Generic[K]):
    """`priority` is the present one; the entry's item in the heap may show an older, lower."""

    __slots__ = ("cost_per_byte", "held", "parent", "priority", "queued", "uses")

    def __init__(self, parent: K | None, cost_per_byte: float) -> None:
        self.parent = parent
        self.cost_per_byte = cost_per_byte
        self.uses = 0
        self.held = False
        self.queued = False
        self.priority = 0.0


class CostAware(Generic[K]):
    """O(1) a use, O(log n) a victim, amortised: priorities only rise, so a block has one heap item.

    Recomputing the block at depth d costs `1 + d / attention_depth`: its own matrices, and
    attention to what comes before; at `attention_depth` blocks the two are equal.
    """

    def __init__(self, attention_depth: float = 256.0) -> None:
        self._attention_depth = attention_depth
        self._entries: dict[K, _Entry[K]] = {}
        self._num_children: defaultdict[K, int] = defaultdict(int)  # resident children, by parent
        self._heap: list[_Item[K]] = []
        self._serial = 0
        self._inflation = 0.0

    def insert(
        self, key: K, use: Use, parent: K | None = None, depth: int = 0, nbytes: int = 1
    ) -> None:
        cost = (1.0 + depth / self._attention_depth) / max(1, nbytes)
        self._entries[key] = _Entry(parent, cost)
        if parent is not None:
            self._num_children[parent] += 1
        self.touch(key, use)

    def hold(self, key: K) -> None:
        self._entries[key].held = True

    def release(self, key: K, use: Use) -> None:
        self._entries[key].held = False
        self.touch(key, use)

    def touch(self, key: K, use: Use) -> None:
        entry = self._entries[key]
        entry.uses += 1
        entry.priority = self._inflation + entry.uses * entry.cost_per_byte
        self._queue(key, entry)

    def remove(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._leave_parent(entry)

    def victim(self) -> K | None:
        item = self._pop_coldest()
        if item is None:
            return None
        self._inflation, _, key = item
        self._leave_parent(self._entries.pop(key))
        return key

    def coldest(self, count: int) -> list[K]:
        """O(count log n). Parents follow only when their children have left. Changes no order."""
        items: list[_Item[K]] = []
        while len(items) < count and (item := self._pop_coldest()) is not None:
            items.append(item)
        for item in items:
            self._entries[item[2]].queued = True
            heapq.heappush(self._heap, item)
        return [key for _, _, key in items]

    def _pop_coldest(self) -> _Item[K] | None:
        """Take the lowest leaf off the heap; others met on the way are dropped or moved."""
        while self._heap:
            item = heapq.heappop(self._heap)
            priority, _, key = item
            entry = self._entries.get(key)
            if entry is None or not entry.queued:
                continue
            entry.queued = False
            if entry.priority > priority:
                self._queue(key, entry)
            elif not entry.held and key not in self._num_children:
                return item
        return None

    def _queue(self, key: K, entry: _Entry[K]) -> None:
        if not entry.queued:
            entry.queued = True
            self._serial += 1
            heapq.heappush(self._heap, (entry.priority, self._serial, key))

    def _leave_parent(self, entry: _Entry[K]) -> None:
        """The parent of a block that left may be a leaf now."""
        parent = entry.parent
        if parent is None:
            return
        self._num_children[parent] -= 1
        if self._num_children[parent] == 0:
            del self._num_children[parent]
            above = self._entries.get(parent)
            if above is not None and not above.held:
                self._queue(parent, above)
