"""The prefix explorer's data: all tiers as one tree, single blocks, and why a prompt missed.

Joins data of three threads: the index (engine thread, through `Engine.call`), a snapshot of the
disk (a worker thread; reused for some seconds), and the owners' names (a worker thread). Called on
the event loop, which none of them blocks.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from api.cache.owners import Owner, Owners
from api.errors import NotServed, RecordNotFound
from api.journal.journal import RequestRecord
from api.journal.why import MissFinding
from tiers.blocks.keys import PrefixKey
from tiers.blocks.tree import Tree, TreeQuery
from tiers.blocks.view import BlockView
from tiers.disk.inspection.view import DiskView
from tiers.explore import BlockDetail, DiskBlocks, TierForest, read_disk, same_start
from tiers.operations.face import BlockOperations, CacheOperations
from tiers.tier import TierName

DISK_FRESH_S = 5.0  # how long a snapshot of the disk is reused
MAX_BELOW = 20_000  # blocks listed at once
NOBODY = ("no tenant here", "another model")  # labels of scopes that no current name derives
T = TypeVar("T")


class Caller(Protocol):
    """`Engine.call`."""

    def __call__(self, function: Callable[[CacheOperations], T]) -> "Future[T]": ...


class BlockCaller(Protocol):
    """`Engine.call` of an engine whose blocks are in this process."""

    def __call__(self, function: Callable[[BlockOperations], T]) -> "Future[T]": ...


def in_process(call: BlockCaller | None) -> BlockCaller:
    """Raises NotServed for the blocks of an engine elsewhere."""
    if call is None:
        raise NotServed(
            "The engine has its blocks in another process, where this server cannot look at them. "
            "`cachesvc node --stats` has the counters of a node beneath it."
        )
    return call


@dataclass(frozen=True, slots=True)
class Grown:
    """A tree, the owner of each scope, and whether the snapshot of the disk omits blocks."""

    tree: Tree
    owners: dict[PrefixKey, Owner]
    cut: bool


class Explorer:
    """Reads the cache for admins. Raises RecordNotFound for a key that no tier holds, and NotServed
    where `call` is None: the blocks are in another process."""

    def __init__(
        self,
        call: BlockCaller | None,
        owners: Owners,
        disk_view: Callable[[], AbstractContextManager[DiskView]] | None,
        *,
        block_bytes: int,
    ) -> None:
        self._call = call
        self.owners = owners
        self._disk_view = disk_view
        self._disk = DiskBlocks()
        self._disk_read_s = 0.0
        self._reading = asyncio.Lock()
        self.block_bytes = block_bytes

    @property
    def has_blocks(self) -> bool:
        """Whether the blocks are in this process."""
        return self._call is not None

    async def tree(self, query: TreeQuery, tenant: str = "") -> Grown:
        """The tree below the query's roots, or of all scopes, or of one tenant's or group's
        scopes."""
        disk = await self.fresh_disk()
        owners = await asyncio.to_thread(self.owners.by_root)

        def grow(cache: BlockOperations) -> Tree:
            forest = TierForest(cache.index, disk)
            if not tenant:
                return forest.tree(query)
            mine = {root for root, owner in owners.items() if owner.name == tenant}
            roots = tuple(root for root in forest.scopes() if root in mine)
            if not roots:
                return Tree([], 0, 0)
            return forest.tree(replace(query, roots=roots))

        return Grown(await self.on_engine(grow), owners, disk.cut)

    async def find(self, key_start: str) -> list[PrefixKey]:
        """Some of the keys that begin with these hex digits."""
        return await self._forest(lambda forest: forest.starting(key_start))

    async def block(self, key: PrefixKey) -> tuple[BlockDetail, Owner | None]:
        found = await self._forest(lambda forest: forest.detail(key))
        if found is None:
            raise RecordNotFound(
                f"No tier holds the block {key.hex()} any more; it was evicted or purged."
            )
        owners = await asyncio.to_thread(self.owners.by_root)
        return found, owners.get(found.block.scope) if found.block.scope else None

    async def below(self, key: PrefixKey, *, whole_run: bool = False) -> list[PrefixKey]:
        """A block and its continuations, last first, which is the order to remove them in.

        `whole_run` adds the blocks before it, back to the last branch. At most MAX_BELOW.
        """
        detail, _ = await self.block(key)
        first = detail.trail[-detail.run] if whole_run else key
        keys = await self._forest(lambda forest: forest.below(first, MAX_BELOW), 0.0)
        return keys[::-1]

    async def finding(self, record: RequestRecord, number: int) -> MissFinding:
        """More on why prompt `number` of a request missed; for admins only."""
        lookup = record.served.lookups[number] if record.served is not None else None
        absence = lookup.absence if lookup is not None else None
        if absence is None or self._call is None:
            return MissFinding()
        disk = await self.fresh_disk()
        seed, roots = await self.on_engine(
            lambda cache: (
                cache.mark_seed,
                TierForest(cache.index, disk).scopes_with(absence, record.scope, cache.mark_seed),
            )
        )
        rows, sibling = await asyncio.to_thread(same_start, disk, absence, seed)
        owners = await asyncio.to_thread(self.owners.by_root)
        named = [owners[root].label for root in roots if root in owners]
        strangers = ["a scope of no tenant here"] if len(named) < len(roots) else []
        return MissFinding(rows, sibling.hex() if sibling else None, (*named, *strangers))

    async def room(self, blocks: Iterable[BlockView]) -> list[dict[str, Any]]:
        """Bytes of each owner in each tier, largest first. `blocks` are those above the disk."""
        owners = await asyncio.to_thread(self.owners.by_root)
        taken: Counter[tuple[PrefixKey, TierName]] = Counter()
        for block in blocks:
            for tier in set(block.tiers) - {TierName.DISK}:
                if block.scope is not None:
                    taken[block.scope, TierName(tier)] += self.block_bytes
        if self._disk_view is not None:
            for root, stored in (await asyncio.to_thread(_stored, self._disk_view)).items():
                taken[root, TierName.DISK] = stored
        rows: dict[tuple[str, str], dict[TierName, int]] = {}
        for (root, tier), num_bytes in taken.items():
            owner = owners.get(root)
            row = rows.setdefault((owner.label, owner.model) if owner else NOBODY, {})
            row[tier] = row.get(tier, 0) + num_bytes
        found = [{"owner": who, "model": model, "bytes": row} for (who, model), row in rows.items()]
        return sorted(found, key=lambda each: -sum(each["bytes"].values()))

    async def _forest(self, read: Callable[[TierForest], T], max_age_s: float = DISK_FRESH_S) -> T:
        disk = await self.fresh_disk(max_age_s)
        return await self.on_engine(lambda cache: read(TierForest(cache.index, disk)))

    async def on_engine(self, function: Callable[[BlockOperations], T]) -> T:
        """The result of `function`, run between two steps of the engine."""
        return await asyncio.wrap_future(in_process(self._call)(function))

    async def fresh_disk(self, max_age_s: float = DISK_FRESH_S) -> DiskBlocks:
        """A snapshot of the disk, at most `max_age_s` old. One is taken at a time."""
        if self._disk_view is None:
            return self._disk
        async with self._reading:
            if time.monotonic() - self._disk_read_s > max_age_s:
                self._disk = await asyncio.to_thread(_blocks, self._disk_view)
                self._disk_read_s = time.monotonic()
            return self._disk

    def forget_disk(self) -> None:
        """Drops the snapshot of the disk, which is out of date."""
        self._disk_read_s = 0.0


def _blocks(disk_view: Callable[[], AbstractContextManager[DiskView]]) -> DiskBlocks:
    with disk_view() as view:
        return read_disk(view)


def _stored(disk_view: Callable[[], AbstractContextManager[DiskView]]) -> dict[PrefixKey, int]:
    """Bytes on disk by scope, from the disk tier's own counts; no block is read."""
    with disk_view() as view:
        return {root: account.stored_bytes for root, account in view.accounts().items()}
