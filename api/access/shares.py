"""A bounded resource that tenants share and that no tenant can monopolise."""

from collections import Counter
from typing import Final

OPERATOR: Final = ""  # acts for no tenant, like the dashboard
_ALPHA = 3  # a tenant alone may hold 3/4, two tenants 3/7 each, three 3/10 each


class Shares:
    """How much of `capacity` each tenant holds. Event loop only.

    A tenant may hold up to `_ALPHA` times what is free. So something is always left for a newcomer,
    and little lies idle. The rule comes from Choudhury and Hahne, "Dynamic Queue Length Thresholds
    for Shared-Memory Packet Switches" (IEEE/ACM Transactions on Networking 6, 1998), section II.

    Invariant: the held amounts sum to `used`, which is at most `capacity`.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: Counter[str] = Counter()
        self.used = 0

    def take(self, tenant: str, amount: int = 1) -> bool:
        """Takes `amount` for the tenant. Returns False, and takes nothing, if that is too much."""
        free = self._capacity - self.used
        if amount > free or self._held[tenant] + amount > _ALPHA * free:
            return False
        self._held[tenant] += amount
        self.used += amount
        return True

    def give_back(self, tenant: str, amount: int = 1) -> None:
        assert 0 <= amount <= self._held[tenant], (tenant, amount, self._held[tenant])
        self._held[tenant] -= amount
        self.used -= amount
        if not self._held[tenant]:
            del self._held[tenant]

    def held(self, tenant: str) -> int:
        return self._held.get(tenant, 0)
