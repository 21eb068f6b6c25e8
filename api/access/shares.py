"""A bounded resource that tenants share and that no tenant can monopolise."""

from collections import Counter
from typing import Final

from engine.scheduling.shares import owner_of

OPERATOR: Final = ""  # acts for no tenant, like the dashboard
_ALPHA = 3  # a tenant alone may hold 3/4, two tenants 3/7 each, three 3/10 each


class Shares:
    """How much of `capacity` each tenant holds. Event loop only.

    A tenant may hold up to `_ALPHA` times what is free. So something is always left for a newcomer,
    and little lies idle. The rule comes from Choudhury and Hahne, "Dynamic Queue Length Thresholds
    for Shared-Memory Packet Switches" (IEEE/ACM Transactions on Networking 6, 1998), section II.

    A part of a tenant's share (`engine.scheduling.shares.part_of`), such as an end user's, may hold
    up to `_ALPHA` times what its tenant could still take.

    Invariant: the tenants' held amounts sum to `used`, which is at most `capacity`.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: Counter[str] = Counter()
        self.used = 0

    def take(self, share: str, amount: int = 1) -> bool:
        """Takes `amount` for a tenant or a part. Returns False, and takes nothing, if that is too
        much."""
        tenant = owner_of(share)
        free = self._capacity - self.used
        room = min(free, _ALPHA * free - self._held[tenant])
        if amount > room or (share != tenant and self._held[share] + amount > _ALPHA * room):
            return False
        for holder in {tenant, share}:
            self._held[holder] += amount
        self.used += amount
        return True

    def give_back(self, share: str, amount: int = 1) -> None:
        assert 0 <= amount <= self._held[share], (share, amount, self._held[share])
        self.used -= amount
        for holder in {owner_of(share), share}:
            self._held[holder] -= amount
            if not self._held[holder]:
                del self._held[holder]

    def held(self, share: str) -> int:
        return self._held.get(share, 0)
