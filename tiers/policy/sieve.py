"""SIEVE: a FIFO with one bit a block and a hand that spares what was used since it last came by.

Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024, algorithm 1.
"""

from typing import Generic

from tiers.policy.held import HeldSet
from tiers.policy.policy import K, Use


class _Node(Generic[K]):
    """A place in the queue; `newer` and `older` close into a ring through the sentinel."""

    __slots__ = ("key", "newer", "older", "visited")

    def __init__(self, key: K | None) -> None:
        self.key = key
        self.visited = False
        self.newer: _Node[K] = self
        self.older: _Node[K] = self


class Sieve(Generic[K]):
    """Evicts the first unused block the hand meets, walking from the oldest to the newest.

    A held block that the hand meets leaves the queue and comes back at its newest end.
    """

    def __init__(self) -> None:
        self._nodes: dict[K, _Node[K]] = {}  # parked blocks absent
        self._ring: _Node[K] = _Node(None)  # sentinel: .newer is the oldest, .older the newest
        self._hand: _Node[K] = self._ring
        self._held: HeldSet[K] = HeldSet()

    def insert(self, key: K, use: Use, parent: K | None = None, depth: int = 0) -> None:
        node = _Node(key)
        newest = self._ring.older
        node.older, node.newer = newest, self._ring
        newest.newer = self._ring.older = node
        self._nodes[key] = node

    def hold(self, key: K) -> None:
        self._held.hold(key)

    def release(self, key: K, use: Use) -> None:
        if self._held.release(key):
            self.insert(key, use)
        self._nodes[key].visited = True

    def touch(self, key: K, use: Use) -> None:
        self._nodes[key].visited = True

    def remove(self, key: K) -> None:
        self._held.discard(key)
        node = self._nodes.pop(key, None)
        if node is not None:
            self._unlink(node)

    def victim(self) -> K | None:
        while self._nodes:
            node = self._hand if self._hand is not self._ring else self._ring.newer
            self._hand = node.newer
            if node.visited:
                node.visited = False
                continue
            assert node.key is not None, "the hand stands on the sentinel of a queue with blocks"
            self._unlink(node)
            del self._nodes[node.key]
            if node.key not in self._held:
                return node.key
            self._held.park(node.key)
        return None

    def coldest(self, count: int) -> list[K]:
        """Unused blocks from the hand on; used ones would be spared in this round."""
        found: list[K] = []
        node = self._hand
        for _ in range(len(self._nodes) + 1):
            if len(found) >= count:
                break
            if node.key is not None and not node.visited and node.key not in self._held:
                found.append(node.key)
            node = node.newer
        return found

    def _unlink(self, node: _Node[K]) -> None:
        if self._hand is node:
            self._hand = node.newer
        node.older.newer, node.newer.older = node.newer, node.older
