"""S3-FIFO: a small queue on probation, a main queue, and a ghost of what left probation unused.

Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023, algorithm 1. A tenth of
the capacity for the small queue, two bits of frequency, and as many ghosts as the main queue holds
are the paper's.
"""

from collections import OrderedDict
from typing import Generic

from tiers.policy.held import HeldSet
from tiers.policy.policy import K, Use

_MAX_USES = 3  # two bits a block


class S3Fifo(Generic[K]):
    """Evicts from the small queue while that holds its tenth, else from the main one.

    A held block met at the end of a queue comes back at the start of the same queue.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._num_small = max(1, capacity_blocks // 10)
        self._num_ghosts = max(1, capacity_blocks - self._num_small)
        self._small: OrderedDict[K, int] = (
            OrderedDict()
        )  # key -> uses since insertion, oldest first
        self._main: OrderedDict[K, int] = OrderedDict()
        self._ghosts: OrderedDict[K, None] = OrderedDict()
        self._held: HeldSet[K] = HeldSet()
        self._parked_main: set[K] = set()  # held blocks that left the main queue, not the small one

    def insert(self, key: K, use: Use, parent: K | None = None, depth: int = 0) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def hold(self, key: K) -> None:
        self._held.hold(key)

    def release(self, key: K, use: Use) -> None:
        if self._held.release(key):
            queue = self._main if key in self._parked_main else self._small
            self._parked_main.discard(key)
            queue[key] = 0
        self.touch(key, use)

    def touch(self, key: K, use: Use) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, _MAX_USES)

    def remove(self, key: K) -> None:
        self._held.discard(key)
        self._parked_main.discard(key)
        self._small.pop(key, None)
        self._main.pop(key, None)

    def victim(self) -> K | None:
        while self._small or self._main:
            if len(self._small) >= self._num_small or not self._main:
                key = self._next_of_small()
            else:
                key = self._next_of_main()
            if key is not None:
                return key
        return None

    def coldest(self, count: int) -> list[K]:
        """Unused blocks of the small queue, then of the main one."""
        found: list[K] = []
        for queue in (self._small, self._main):
            for key, uses in queue.items():
                if len(found) >= count:
                    return found
                if not uses and key not in self._held:
                    found.append(key)
        return found

    def _next_of_small(self) -> K | None:
        """Take one block off the small queue: evicted and returned, or moved elsewhere (None)."""
        key, uses = self._small.popitem(last=False)
        if key in self._held:
            self._held.park(key)
            return None
        if uses > 1:
            self._main[key] = 0
            return None
        self._ghosts[key] = None
        if len(self._ghosts) > self._num_ghosts:
            self._ghosts.popitem(last=False)
        return key

    def _next_of_main(self) -> K | None:
        """Take one block off the main queue: evicted and returned, or kept for a round (None)."""
        key, uses = self._main.popitem(last=False)
        if key in self._held:
            self._held.park(key)
            self._parked_main.add(key)
            return None
        if uses:
            self._main[key] = uses - 1
            return None
        return key
