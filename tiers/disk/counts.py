"""The disk tier's counters, and its readers' pending updates for the next write, under one lock.

Readers must not open a write transaction for a hit. So uses (for the order of eviction) and
unreadable records wait here, bounded, until one opens.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from tiers.blocks.keys import PrefixKey
from tiers.errors import MissReason
from tiers.tier import TierName, TierStats

logger = logging.getLogger(__name__)

MAX_USED = 16_384  # per shard; further hits are counted but do not move their blocks in the order
LOG_EVERY_S = 10.0


@dataclass(slots=True)
class Pending:
    """Updates for one shard's next write transaction."""

    # Times of use, least recent first; duplicated blocks are to leave first.
    used: dict[PrefixKey, int] = field(default_factory=dict)
    duplicated: dict[PrefixKey, int] = field(default_factory=dict)
    condemned: set[PrefixKey] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.used or self.duplicated or self.condemned)

    def split(self, num_blocks: int) -> "Pending":
        """Takes out updates of at most `num_blocks`. These are the least recent uses, and the most
        recent of the duplicated blocks, so that several parts give the same order as one."""
        part = Pending()
        while self.condemned and num_blocks > 0:
            part.condemned.add(self.condemned.pop())
            num_blocks -= 1
        for key in list(islice(self.used, num_blocks)):
            part.used[key] = self.used.pop(key)
            num_blocks -= 1
        while self.duplicated and num_blocks > 0:
            part.duplicated.update((self.duplicated.popitem(),))
            num_blocks -= 1
        return part


class DiskCounts:
    """Counters and pending work of one tier. Every method is short and takes the lock itself."""

    def __init__(self, num_shards: int, faults: Mapping[MissReason, int]) -> None:
        self._lock = threading.Lock()
        self._counted = TierStats(TierName.DISK)
        self._faults = Counter(faults)
        self._pending = [Pending() for _ in range(num_shards)]
        self._dropped: list[PrefixKey] = []
        self._logged_s: dict[MissReason, float] = {}

    def snapshot(self) -> TierStats:
        """The tier's counters, without its sizes."""
        with self._lock:
            return replace(self._counted, faults=dict(self._faults))

    def loaded(self, *, num_loaded: int, num_missed: int, read_bytes: int) -> None:
        with self._lock:
            self._add(hits=num_loaded, misses=num_missed, read_bytes=read_bytes)

    def wrote(self, num_blocks: int, written_bytes: int, evicted: list[PrefixKey]) -> None:
        with self._lock:
            self._add(stored=num_blocks, written_bytes=written_bytes, evicted=len(evicted))
            self._dropped += evicted

    def _add(self, **more: int) -> None:
        """With the lock held."""
        totals = {name: getattr(self._counted, name) + count for name, count in more.items()}
        self._counted = replace(self._counted, **totals)

    def refused(self, keys: Iterable[PrefixKey]) -> None:
        """Records blocks that were to be written and are not stored."""
        with self._lock:
            self._dropped += keys

    def take_dropped(self) -> list[PrefixKey]:
        """Keys evicted or refused since the last call."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    def fault(self, why: MissReason, num_blocks: int, what: str) -> None:
        """Counts blocks lost to a fault, and logs it at most every LOG_EVERY_S."""
        now = time.monotonic()
        with self._lock:
            self._faults[why] += num_blocks
            total = self._faults[why]
            quiet = now - self._logged_s.get(why, -LOG_EVERY_S) < LOG_EVERY_S
            if not quiet:
                self._logged_s[why] = now
        if not quiet:
            logger.warning(f"disk cache: {what} ({why}, {total} so far)")

    def use(self, number: int, uses: Iterable[tuple[PrefixKey, int]], *, duplicated: bool) -> None:
        """Records uses of blocks in shard `number`, which move them in the order of eviction. The
        last is the most recent. If `duplicated`, they move to the old end."""
        with self._lock:
            pending = self._pending[number]
            to, other = (
                (pending.duplicated, pending.used)
                if duplicated
                else (pending.used, pending.duplicated)
            )
            for key, used_s in uses:
                used_s = max(used_s, other.pop(key, 0), to.get(key, 0))
                if key in to or len(to) < MAX_USED:
                    to.pop(key, None)
                    to[key] = used_s

    def condemn(self, number: int, key: PrefixKey) -> None:
        """Marks an unreadable record, which the next write deletes."""
        with self._lock:
            self._pending[number].condemned.add(key)

    def take_pending(self, number: int) -> Pending:
        with self._lock:
            pending, self._pending[number] = self._pending[number], Pending()
            return pending

    def give_back(self, number: int, pending: Pending) -> None:
        """After a failed transaction, keeps what must not be lost. The order of eviction may be."""
        with self._lock:
            self._pending[number].condemned |= pending.condemned
