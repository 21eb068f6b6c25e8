"""Disk and remote tier as one `Tier` for the mover: the disk first, then the tier below it.

`load` tells for each block which of the two served it. A block from the remote tier is not on this
disk. It is written there when the tiers above give it up, like a block computed here.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager

from tiers.blocks.frames import Frame
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.disk.inspection.view import DiskView
from tiers.disk.tier import DiskTier
from tiers.errors import MissReason
from tiers.remote.objects import ObjectStore
from tiers.remote.seal import Seal
from tiers.remote.settings import RemoteSettings, RemoteWrites
from tiers.remote.tier import RemoteTier
from tiers.tier import Age, Leveled, Loaded, ManagedTier, Removed, TierName, TierStats

logger = logging.getLogger(__name__)

MAX_SEEN = 1 << 17  # keys whose hits are counted: 20 MB
PUBLISH_HITS = 2


class StackedTier(ManagedTier):
    """A disk tier with a remote tier below it."""

    name = TierName.DISK

    def __init__(self, disk: DiskTier, remote: RemoteTier, writes: RemoteWrites) -> None:
        self.disk = disk
        self.remote = remote
        self._writes = writes
        self._lock = threading.Lock()
        self._hits: OrderedDict[PrefixKey, int] = OrderedDict()
        self._kept: frozenset[PrefixKey] = frozenset()

    @property
    def view(self) -> Callable[[], AbstractContextManager[DiskView]]:
        return self.disk.view

    def probe(self, ids: Sequence[BlockId]) -> int:
        return len(self.places(ids)[0])

    @property
    def num_readers(self) -> int:
        return self.disk.num_readers

    def levels(self) -> Sequence[Leveled]:
        return (*self.disk.levels(), self.remote)

    def places(self, ids: Sequence[BlockId]) -> tuple[list[TierName], bool]:
        found, _ = self.disk.places(ids)
        rest = ids[len(found) :]
        num_there = self.remote.probe(rest) if rest else 0
        if not self.remote.pays(num_there, self.num_readers):
            return found, True
        return found + [self.remote.name] * num_there, False

    def paced(self, prefill_tokens_per_s: float) -> None:
        self.remote.economy.prefill_tokens_per_s = prefill_tokens_per_s

    @property
    def is_shared(self) -> bool:
        return True

    def publish(self, keys: Sequence[PrefixKey]) -> "Future[int]":
        return self.remote.deliver(keys)

    def load(self, ids: Sequence[BlockId], into: Sequence[Frame]) -> Loaded:
        wanted = ids[: len(into)]
        sources, ages, stop = list[TierName](), list[float](), 0
        reason: MissReason | None = MissReason.ABSENT  # what was said first of the block at stop
        while len(sources) < len(wanted):
            before = len(sources)
            for tier in (self.disk, self.remote):
                at = len(sources)
                loaded = tier.load(wanted[at:], into[at : len(wanted)])
                sources += loaded.sources or [tier.name] * loaded.num_blocks
                ages += loaded.ages or [0.0] * loaded.num_blocks
                if tier is self.disk:
                    self.used([block.key for block in wanted[at : len(sources)]])
                if len(sources) > stop or reason is MissReason.ABSENT:
                    stop, reason = len(sources), loaded.reason
                if len(sources) == len(wanted):
                    break
            if len(sources) == before:
                break
        return Loaded(len(sources), reason, tuple(sources), tuple(ages))

    def store(
        self, ids: Sequence[BlockId], frames: Sequence[Frame], ages: Sequence[Age] = ()
    ) -> list[PrefixKey]:
        dropped = self.disk.store(ids, frames, ages)
        if self._writes is RemoteWrites.ALL:
            self.remote.publish({block.key for block in ids} - set(dropped))
        else:
            self.remote.publish(
                block.key
                for block in ids
                if block.key in self._kept or self._hits.get(block.key, 0) >= PUBLISH_HITS
            )
        return dropped

    def used(self, keys: Sequence[PrefixKey]) -> None:
        if self._writes is RemoteWrites.ALL:
            return
        reused: list[PrefixKey] = []
        with self._lock:
            for key in keys:
                count = self._hits.pop(key, 0) + 1
                self._hits[key] = count
                if count == PUBLISH_HITS:
                    reused.append(key)
            while len(self._hits) > MAX_SEEN:
                self._hits.popitem(last=False)
        self.remote.publish(reused)

    def keep(self, keys: Collection[PrefixKey]) -> None:
        fresh = frozenset(keys) - self._kept
        self._kept = frozenset(keys)
        self.disk.keep(keys)
        self.remote.publish(fresh)

    def discard(self, keys: Sequence[PrefixKey]) -> int:
        """Remove these here and remotely. Raises RemoteError if the remote part fails."""
        scoped = [(block.scope, key) for key in keys if (block := self.disk.trace(key)) is not None]
        num_held = self.disk.discard(keys)
        self.remote.discard([pair for pair in scoped if pair[1] not in self._kept])
        return num_held

    def have_windows(self, ids: Sequence[BlockId]) -> list[bool]:
        """What the store holds is taken to be whole."""
        there = self.disk.have_windows(ids)
        lacking = [block for block, windows in zip(ids, there, strict=True) if not windows]
        found = iter(self.remote.exist(lacking) if lacking else ())
        return [windows or next(found) for windows in there]

    def demoted(
        self, keys: Sequence[PrefixKey], idle_s: Sequence[float], windows: Sequence[bool] = ()
    ) -> None:
        self.disk.demoted(keys, idle_s, windows)

    def held(self, keys: Sequence[PrefixKey]) -> list[bool]:
        return self.disk.held(keys)

    def trace(self, key: PrefixKey) -> BlockId | None:
        return self.disk.trace(key)

    def quotas(self) -> Mapping[Hashable, tuple[int, int]]:
        return self.disk.quotas()

    def purge(self, roots: Collection[PrefixKey]) -> Removed:
        """Remove the scopes here and remotely. Raises storage errors and RemoteError."""
        return self.disk.purge(roots).plus(self.remote.purge(roots))

    def count(self, roots: Collection[PrefixKey]) -> int:
        return self.disk.count(roots) + self.remote.count(roots)

    def flush(self) -> None:
        self.disk.flush()

    def stats(self) -> TierStats:
        return self.disk.stats()

    def close(self) -> None:
        self.remote.close()
        self.disk.close()


def stack(
    disk: DiskTier,
    layout: BlockLayout,
    opened: tuple[ObjectStore, Seal | None],
    settings: RemoteSettings,
) -> StackedTier:
    """Put the store that `settings.open` returned below a disk."""
    objects, seal = opened
    logger.info(f"blocks are shared with other servers through {settings.shown_url}")
    remote = RemoteTier(objects, layout, disk.read_record, seal=seal)
    return StackedTier(disk, remote, settings.writes)
