"""Shares of the cache among tenants: bytes over all tiers, lent while idle, taken back on need.

A `FairPolicy` stands in for a tier's policy. It keeps one policy for each tenant with a quota and
one for all the others together, and takes its victim from the group furthest over its share, so
that one tenant's scan evicts that tenant's own blocks. The tiers' policies share one `Quotas`.
Pure; engine thread.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Generic

from tiers.errors import ConfigurationError
from tiers.policy.policy import K, Policy, Use

COMMON = None  # the group of every tenant without a quota of its own


class Quotas:
    """Bytes that each group may use and uses, over all tiers, every copy counted.

    Groups are tenants with a quota, or sharing groups, and `COMMON`, whose share is what the quotas
    leave. The shares sum to the capacity: where a group is over its share while all is full, some
    other is under its own.
    """

    def __init__(self, capacity_bytes: int, quotas: Mapping[Hashable, int]) -> None:
        for tenant, quota in quotas.items():
            if quota < 0:
                raise ConfigurationError(f"the quota of {tenant!r} is {quota} bytes; use 0 or more")
        promised = sum(quotas.values())
        if promised > capacity_bytes:
            raise ConfigurationError(
                f"the quotas promise {promised} bytes, but all tiers together hold "
                f"{capacity_bytes}; lower the quotas or raise the capacities"
            )
        self._shares: dict[Hashable, int] = {**quotas, COMMON: capacity_bytes - promised}
        self._used: dict[Hashable, int] = dict.fromkeys(self._shares, 0)

    def group(self, tenant: Hashable) -> Hashable:
        """Which group a tenant's blocks are counted in."""
        return tenant if tenant in self._shares else COMMON

    def charge(self, group: Hashable, nbytes: int) -> None:
        self._used[group] += nbytes

    def credit(self, group: Hashable, nbytes: int) -> None:
        self._used[group] -= nbytes
        assert self._used[group] >= 0, f"{group!r} gave back more bytes than it had"

    def is_over(self, group: Hashable) -> bool:
        return self._used[group] > self._shares[group]

    def pressure(self, group: Hashable) -> float:
        """Bytes used for each byte of its share: above 1 the group borrows."""
        return self._used[group] / max(1, self._shares[group])

    def usage(self) -> dict[Hashable, tuple[int, int]]:
        """Per group: (used, share) in bytes."""
        return {group: (used, self._shares[group]) for group, used in self._used.items()}


class FairPolicy(Generic[K]):
    """Invariant: a group at or under its share loses no block while another here is over its own.

    A victim costs one look at its group while that stays over its share; then the groups of this
    tier are compared once.
    """

    def __init__(self, quotas: Quotas, make: Callable[[], Policy[K]]) -> None:
        self._quotas = quotas
        self._make = make
        self._policies: dict[Hashable, Policy[K]] = {}
        self._owners: dict[K, tuple[Hashable, int]] = {}  # key -> (group, bytes)
        self._victims: Hashable = COMMON  # the group that victims are being taken from

    def insert(
        self, key: K, use: Use, parent: K | None = None, depth: int = 0, nbytes: int = 1
    ) -> None:
        group = self._quotas.group(use.tenant)
        if group not in self._policies:
            self._policies[group] = self._make()
        self._quotas.charge(group, nbytes)
        self._owners[key] = (group, nbytes)
        self._policies[group].insert(key, use, parent, depth, nbytes)

    def hold(self, key: K) -> None:
        self._policies[self._owners[key][0]].hold(key)

    def release(self, key: K, use: Use) -> None:
        self._policies[self._owners[key][0]].release(key, use)

    def touch(self, key: K, use: Use) -> None:
        self._policies[self._owners[key][0]].touch(key, use)

    def remove(self, key: K) -> None:
        if key in self._owners:
            self._policies[self._owners[key][0]].remove(key)
            self._forget(key)

    def victim(self) -> K | None:
        """From the group furthest over its share that has a block to give."""
        if self._victims in self._policies and self._quotas.is_over(self._victims):
            key = self._policies[self._victims].victim()
            if key is not None:
                self._forget(key)
                return key
        for group in self._by_pressure():
            key = self._policies[group].victim()
            if key is not None:
                self._victims = group
                self._forget(key)
                return key
        return None

    def coldest(self, count: int) -> list[K]:
        found: list[K] = []
        for group in self._by_pressure():
            if len(found) >= count:
                break
            found += self._policies[group].coldest(count - len(found))
        return found

    def _by_pressure(self) -> list[Hashable]:
        return sorted(self._policies, key=self._quotas.pressure, reverse=True)

    def _forget(self, key: K) -> None:
        group, nbytes = self._owners.pop(key)
        self._quotas.credit(group, nbytes)
