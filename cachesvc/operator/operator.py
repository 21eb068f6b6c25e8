"""Operators' actions on the running cache: the admin routes' calls on the engine thread.

Event loop only. Every call runs between two steps of the engine and then waits for the disk, so an
answer means that the change is durable.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from api.cache.explorer import BlockCaller, Caller, in_process
from api.errors import CacheNotKept, CacheNotPaid
from api.job import Job, Kept
from billing.reports.receipts import ReceiptSigner
from cachesvc.operator.purge import keep_receipt, purge_unserved, receipt, roots_to_purge, together
from cachesvc.operator.scopes import ScopeKind
from cachesvc.operator.storage_meter import StorageMeter
from tiers.blocks.chain import Chain, KeyedPrefix
from tiers.blocks.keys import PrefixKey
from tiers.errors import NotSaved
from tiers.operations.face import BlockOperations, CacheOperations
from tiers.policy.retention import Pin, PinError, PinKind
from tiers.tier import Purged

T = TypeVar("T")

logger = logging.getLogger(__name__)

LOOK_S = 0.01  # between two checks whether the disk has the blocks to publish
PUBLISH_S = 10.0  # after that the rest is left to be computed


class UnpaidPin(PinError):
    """A pin whose first hour is not covered by the balance."""


class CacheOperator:
    """What is asked of one engine's cache: a `CacheAdmin`, a `TenantPins` and a `Publisher`."""

    def __init__(
        self,
        call: Caller,
        blocks: BlockCaller | None,
        block_size: int,
        data_dir: Path,
        signer: ReceiptSigner,
        storage: StorageMeter | None = None,
        wall_clock: Callable[[], float] = time.time,
        *,
        forget: Callable[[ScopeKind, str], Awaitable[None]] | None = None,
        elsewhere: Sequence[str] = (),
    ) -> None:
        """`blocks` calls an engine whose blocks are in this process; else it is None, and nothing
        is retained in passing. `forget` removes everything else that is stored for a purged tenant
        or group, or raises PurgeFailed. `elsewhere` are the models of engines that no purge
        reaches."""
        self._call_engine = call
        self._blocks = blocks
        self.block_size = block_size
        self._data_dir = data_dir
        self._signer = signer
        self._storage = storage
        self._wall_clock = wall_clock
        self._forget_owner = forget
        self._elsewhere = elsewhere

    async def pin(
        self, name: str, prefix: Chain | KeyedPrefix, until_s: float, why: str, *, owner: str = ""
    ) -> Pin[PrefixKey]:
        """Pins a prefix, durably. Raises PinError, also if its first hour is not paid for, and
        NotSaved; then there is no pin of this name."""
        await self._settle_storage()
        for_s = until_s - self._wall_clock()  # the cache's own clock is not set when this one is

        def set_pin(cache: CacheOperations) -> Pin[PrefixKey]:
            return cache.pin(name, prefix, cache.now_s + for_s, why, owner=owner)

        pin = await self._call(set_pin)
        try:
            await self._saved()
        except NotSaved:
            await self._call(lambda cache: cache.unpin(name))
            raise
        if name in await self._settle_storage():
            raise UnpaidPin(f"the tenant's balance does not cover an hour of the pin {name!r}")
        return pin

    async def unpin(self, name: str) -> bool:
        await self._settle_storage()
        found = await self._call(lambda cache: cache.unpin(name))
        self._forget([name])
        await self._saved()
        return found

    async def pins(self) -> Sequence[Pin[PrefixKey]]:
        return await self._call(lambda cache: cache.pins())

    async def prefix_of(self, key: PrefixKey) -> KeyedPrefix:
        """The prefix that ends with this block; no keys if a block is missing. Raises NotServed
        where the blocks are in another process."""
        find = in_process(self._blocks)
        found = await asyncio.wrap_future(find(lambda cache: cache.prefix_of(key)))
        return await asyncio.wrap_future(found)

    async def evict(self, keys: Sequence[PrefixKey]) -> dict[str, int]:
        """Blocks removed, by tier. Raises NotServed where the blocks are in another process."""
        evict = in_process(self._blocks)
        begun = await asyncio.wrap_future(evict(lambda cache: cache.evict(keys)))
        removed = await asyncio.wrap_future(begun)
        return {str(tier): count for tier, count in removed.items()}

    async def publish(self, job: Job) -> int:
        """Sends a prompt's blocks to the store that servers share, and waits until they are there.

        The engine thread passes the work to the disk's writer and the remote tier's sender.
        """
        chain = job.chain(0, self.block_size)
        give_up = time.monotonic() + PUBLISH_S
        while time.monotonic() < give_up:
            sending = await self._call(lambda cache: cache.publish(chain))
            if sending is not None:
                left_s = max(0.0, give_up - time.monotonic())
                try:
                    num_blocks = await asyncio.wait_for(asyncio.wrap_future(sending), left_s)
                except TimeoutError:
                    return 0
                return num_blocks * self.block_size
            await asyncio.sleep(LOOK_S)
        return 0

    async def purge(self, kind: str, name: str, *, by: str, why: str) -> dict[str, Any]:
        """Purges a tenant or group from every tier. Returns the signed receipt, also stored as a
        file. Raises PurgeFailed and NotSaved."""
        started_s, whose = time.time(), ScopeKind(kind)
        roots = await asyncio.to_thread(roots_to_purge, self._data_dir, name, whose)
        if self._forget_owner is not None:
            await self._forget_owner(whose, name)
        done = await self._purge(roots)
        signed = receipt(
            self._signer,
            whose,
            name,
            done,
            by=by,
            why=why,
            started_s=started_s,
            elsewhere=self._elsewhere,
        )
        try:
            await asyncio.to_thread(keep_receipt, self._data_dir, signed)
        except OSError as error:
            raise NotSaved(f"the purge is done, but its receipt is lost: {error}") from error
        return signed

    # The pins of tenants: durable ones for their caches, and soft ones for their requests.

    def retain(
        self,
        name: str,
        root: PrefixKey,
        tokens: "array[int]",
        for_s: float,
        *,
        owner: str,
        kind: PinKind,
    ) -> None:
        def set_pin(cache: BlockOperations) -> object:
            chain = Chain(root, tokens, self.block_size)
            return cache.retain(name, chain, cache.now_s + for_s, owner=owner, kind=kind)

        if self._blocks is not None:
            self._blocks(set_pin).add_done_callback(_log_failure)

    def renew(self, name: str, for_s: float) -> None:
        if self._blocks is not None:
            renewed = self._blocks(lambda cache: cache.renew(name, cache.now_s + for_s))
            renewed.add_done_callback(_log_failure)

    def release(self, name: str) -> None:
        self._call_engine(lambda cache: cache.unpin(name)).add_done_callback(_log_failure)

    async def keep(
        self, name: str, prefix: Chain | KeyedPrefix, for_s: float, *, owner: str
    ) -> Kept:
        until_s = time.time() + for_s
        try:
            pin = await self.pin(name, prefix, until_s, "", owner=owner)
        except UnpaidPin:
            raise CacheNotPaid(
                "The balance does not cover the cache's first hour; it is not kept."
            ) from None
        except PinError as error:
            raise CacheNotKept(f"The cache cannot be kept: {error}.") from None
        return _kept(pin, until_s)

    async def end(self, name: str, *, owner: str) -> bool:
        if all(kept.pin.name != name for kept in await self.of_owner(owner)):
            return False
        return await self.unpin(name)

    async def of_owner(self, owner: str) -> Sequence[Kept]:
        now_s, pins = await self._call(lambda cache: (cache.now_s, cache.pins()))
        wall_s = time.time()
        return [_kept(pin, wall_s + pin.until_s - now_s) for pin in pins if pin.owner == owner]

    async def _purge(self, roots: Collection[PrefixKey]) -> Purged:
        await self._settle_storage()
        purged = await self._done(lambda cache: cache.purge(roots))
        self._forget(purged.pins)
        await self._saved()
        rest = await asyncio.to_thread(purge_unserved, self._data_dir, roots)
        return together(purged, rest)

    async def _call(self, work: Callable[[CacheOperations], T]) -> T:
        return await asyncio.wrap_future(self._call_engine(work))

    async def _done(self, work: "Callable[[CacheOperations], Future[T]]") -> T:
        """Waits until the engine has begun, then until the disk is done."""
        return await asyncio.wrap_future(await self._call(work))

    async def _settle_storage(self) -> Collection[str]:
        """Charges the pins' started hours. Returns the names of pins released unpaid."""
        return await self._storage.settle() if self._storage is not None else ()

    def _forget(self, names: Collection[str]) -> None:
        if self._storage is not None:
            for name in names:
                self._storage.forget(name)

    async def _saved(self) -> None:
        """Waits until the current pins are on disk. Raises NotSaved."""
        await self._done(lambda cache: cache.saved())


def _kept(pin: Pin[PrefixKey], expires_s: float) -> Kept:
    return Kept(pin, pin.name.removeprefix(f"{pin.owner}:"), expires_s)


def _log_failure(done: "Future[Any]") -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.error("a prefix is not kept", exc_info=error)
