"""The plain LRU, which the linked orders are compared with. A held block is not in its dict."""

from collections import OrderedDict
from itertools import islice
from typing import Generic

from tiers.policy.policy import K, Use


class Lru(Generic[K]):
    """Evicts the block released longest ago. In a chain released tail first, that is the leaf."""

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()  # oldest first

    def insert(self, key: K, use: Use) -> None:
        self._order[key] = None

    def hold(self, key: K) -> None:
        del self._order[key]

    def release(self, key: K, use: Use) -> None:
        self._order[key] = None

    def touch(self, key: K, use: Use) -> None:
        self._order.move_to_end(key)

    def remove(self, key: K) -> None:
        self._order.pop(key, None)

    def victim(self) -> K | None:
        return self._order.popitem(last=False)[0] if self._order else None

    def coldest(self, count: int) -> list[K]:
        return list(islice(self._order, count))
