"""Decides which blocks eviction skips on disk: pinned ones, and those of groups within their share.

The order of eviction is by age only. A block at the old end that must stay is moved to the recent
end, so eviction meets it only once per turnover of the disk.
"""

import threading
from collections.abc import Collection, Hashable, Mapping

from tiers.blocks.keys import PrefixKey
from tiers.disk.format.record import block_key
from tiers.disk.format.rows import Account
from tiers.policy.quota import COMMON, Quotas


class DiskGuard:
    """Called by the writer threads, one per shard. Thread-safe."""

    def __init__(self, quotas: Quotas | None = None) -> None:
        self._quotas = quotas
        self._lock = threading.Lock()
        self._kept: Collection[PrefixKey] = ()
        self._victims: Hashable = COMMON  # the group furthest over its share, when last compared

    def keep(self, keys: Collection[PrefixKey]) -> None:
        self._kept = keys

    def keeps(self, key: PrefixKey) -> bool:
        return block_key(key) in self._kept

    def spares(self, key: PrefixKey, scope: PrefixKey) -> bool:
        """Whether this block must stay although room is needed."""
        if block_key(key) in self._kept:
            return True
        quotas = self._quotas
        if quotas is None:
            return False
        with self._lock:
            group = quotas.group(scope)
            if quotas.is_over(group):
                return False
            if not quotas.is_over(self._victims):
                self._victims = max(quotas.shares.groups(), key=quotas.pressure)
            return quotas.is_over(self._victims) or group != self._victims

    def is_over(self, scope: PrefixKey) -> bool:
        with self._lock:
            return self._quotas is not None and self._quotas.is_over(self._quotas.group(scope))

    def moved(self, scope: PrefixKey, stored_bytes: int) -> None:
        """Counts a stored block of this scope, or a removed one (negative)."""
        with self._lock:
            if self._quotas is not None:
                self._quotas.charge(self._quotas.group(scope), stored_bytes)

    def recount(self, accounts: Mapping[PrefixKey, Account]) -> None:
        """Recounts from the shards' accounts, after a fault or a change by commands."""
        if self._quotas is None:
            return
        used: dict[Hashable, int] = {}
        for scope, account in accounts.items():
            group = self._quotas.group(scope)
            used[group] = used.get(group, 0) + account.stored_bytes
        with self._lock:
            self._quotas.reset(used)

    def usage(self) -> dict[Hashable, tuple[int, int]]:
        """Per group: (used, share) in stored bytes."""
        with self._lock:
            return self._quotas.usage() if self._quotas is not None else {}
