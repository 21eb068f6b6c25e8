"""Shares of the cache among tenants: lent to others while idle, reclaimed when needed.

A quota is in bytes over all tiers together. Every tier gives its holder the same part: a tenant
promised 10 % of all bytes gets 10 % of the device, of the host and of the disk. A group within its
part of a tier never loses blocks there, whatever the others do.

A `FairPolicy` replaces a tier's policy. It keeps one policy for each group and takes its victim
from the group furthest over its share, so one tenant's scan evicts that tenant's own blocks. Pure.
Each `Quotas` belongs to one thread; any thread may use `QuotaShares`.
"""

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic

from tiers.errors import ConfigurationError
from tiers.policy.policy import K, Policy, Use
from tiers.tier import TierName

COMMON = None  # the group of all tenants without their own quota


@dataclass(frozen=True, slots=True)
class GroupUse:
    """What one group has in one tier. `group` is None for all owners without a quota."""

    tier: TierName
    group: str | None
    used_bytes: int
    share_bytes: int


class QuotaShares:
    """The part of every tier that each group was promised. Any thread.

    The groups are the owners with a quota (tenants or sharing groups) and `COMMON`, which gets the
    part that the quotas leave. The parts sum to 1. With `default_bytes`, every other owner gets a
    quota when it is first seen, while there is room left to promise. After that, owners join
    `COMMON`.
    """

    def __init__(
        self,
        total_bytes: int,
        quotas: Mapping[Hashable, int],
        default_bytes: int = 0,
        owner_of: Callable[[Hashable], Hashable] = lambda tenant: tenant,
    ) -> None:
        """`owner_of` gives the owner of a `Use.tenant`, or None if unknown."""
        for owner, quota in {**quotas, "default": default_bytes}.items():
            if quota < 0:
                raise ConfigurationError(f"the quota of {owner!r} is {quota} bytes; use 0 or more")
        promised = sum(quotas.values())
        if promised > total_bytes:
            raise ConfigurationError(
                f"the quotas promise {promised} bytes, but all tiers together hold "
                f"{total_bytes}; lower the quotas or raise the capacities"
            )
        self._default = default_bytes / total_bytes
        self._owner_of = owner_of
        self._lock = threading.Lock()
        self._shares: dict[Hashable, float] = {
            **{owner: quota / total_bytes for owner, quota in quotas.items()},
            COMMON: (total_bytes - promised) / total_bytes,
        }

    def group(self, tenant: Hashable) -> Hashable:
        owner = self._owner_of(tenant)
        if owner in self._shares:
            return owner
        with self._lock:
            left = self._shares[COMMON] - self._default
            if owner not in self._shares and self._default and left > -1e-9:
                self._shares[COMMON] = max(0.0, left)
                self._shares[owner] = self._default
        return owner if owner in self._shares else COMMON

    def share(self, group: Hashable) -> float:
        return self._shares[group]

    def part_of(self, tenant: Hashable, num_blocks: float) -> int | None:
        """The tenant's part of `num_blocks` blocks. None if it has no quota."""
        group = self.group(tenant)
        return None if group is COMMON else int(num_blocks * self.share(group))

    def groups(self) -> list[Hashable]:
        return list(self._shares)


class Quotas:
    """The bytes that each group was promised and uses in one tier of `capacity_bytes`. If a group
    is over its share while the tier is full, another is under its own."""

    def __init__(self, shares: QuotaShares, capacity_bytes: int) -> None:
        self.shares = shares
        self.capacity_bytes = capacity_bytes
        self._used: dict[Hashable, int] = {}

    def group(self, tenant: Hashable) -> Hashable:
        return self.shares.group(tenant)

    def charge(self, group: Hashable, nbytes: int) -> None:
        self._used[group] = self._used.get(group, 0) + nbytes

    def credit(self, group: Hashable, nbytes: int) -> None:
        self._used[group] -= nbytes
        assert self._used[group] >= 0, f"{group!r} gave back more bytes than it had"

    def reset(self, used: Mapping[Hashable, int]) -> None:
        """Replace the counts with recomputed ones."""
        self._used = dict(used)

    def share(self, group: Hashable) -> int:
        """The bytes of this tier that the group was promised."""
        return int(self.shares.share(group) * self.capacity_bytes + 0.5)

    def is_over(self, group: Hashable) -> bool:
        return self._used.get(group, 0) > self.share(group)

    def pressure(self, group: Hashable) -> float:
        """Bytes used per byte of the group's share. Above 1 the group is borrowing."""
        return self._used.get(group, 0) / max(1, self.share(group))

    def usage(self) -> dict[Hashable, tuple[int, int]]:
        """Per group: (used, share) in bytes."""
        return {each: (self._used.get(each, 0), self.share(each)) for each in self.shares.groups()}


class FairPolicy(Generic[K]):
    """Invariant: a group at or under its share loses no block while another group here is over its
    own and has a block to give.

    While the chosen group stays over its share, a victim costs one check of it. After that, the
    groups of this tier are compared once.
    """

    def __init__(self, quotas: Quotas, make: Callable[[], Policy[K]], block_bytes: int) -> None:
        self._quotas = quotas
        self._make = make
        self._block_bytes = block_bytes
        self._policies: dict[Hashable, Policy[K]] = {}
        self._owners: dict[K, Hashable] = {}  # key -> group
        self._victims: Hashable = COMMON  # the group now losing blocks

    def insert(self, key: K, use: Use) -> None:
        group = self._quotas.group(use.tenant)
        if group not in self._policies:
            self._policies[group] = self._make()
        self._quotas.charge(group, self._block_bytes)
        self._owners[key] = group
        self._policies[group].insert(key, use)

    def hold(self, key: K) -> None:
        self._policies[self._owners[key]].hold(key)

    def release(self, key: K, use: Use) -> None:
        self._policies[self._owners[key]].release(key, use)

    def touch(self, key: K, use: Use) -> None:
        self._policies[self._owners[key]].touch(key, use)

    def remove(self, key: K) -> None:
        if key in self._owners:
            self._policies[self._owners[key]].remove(key)
            self._forget(key)

    def victim(self) -> K | None:
        """The victim of the group furthest over its share, among those with a block to give."""
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
        """The coldest blocks of groups over their share; of others only if those have none."""
        found: list[K] = []
        for group in self._by_pressure():
            if len(found) >= count or (found and not self._quotas.is_over(group)):
                break
            found += self._policies[group].coldest(count - len(found))
        return found

    def _by_pressure(self) -> list[Hashable]:
        return sorted(self._policies, key=self._quotas.pressure, reverse=True)

    def _forget(self, key: K) -> None:
        self._quotas.credit(self._owners.pop(key), self._block_bytes)
