"""The pins of tenants: durable ones for their caches, and soft ones for their requests.

Event loop only; the cache belongs to the engine thread. See `api.requests.retention`.
"""

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from api.cache.explorer import Caller
from api.errors import CacheNotKept, CacheNotPaid
from api.job import Kept
from cachesvc.operator.operator import CacheOperator, UnpaidPin
from tiers.blocks.chain import Chain, KeyedPrefix
from tiers.blocks.keys import PrefixKey
from tiers.operations.face import CacheOperations
from tiers.policy.retention import Pin, PinError, PinKind

logger = logging.getLogger(__name__)


class CachePins:
    """A `TenantPins` on one engine."""

    def __init__(self, call: Caller, operator: CacheOperator) -> None:
        self._call = call
        self._operator = operator
        self.block_size = operator.block_size

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
        def set_pin(cache: CacheOperations) -> object:
            chain = Chain(root, tokens, self.block_size)
            return cache.retain(name, chain, cache.now_s + for_s, owner=owner, kind=kind)

        self._in_passing(set_pin)

    def renew(self, name: str, for_s: float) -> None:
        self._in_passing(lambda cache: cache.renew(name, cache.now_s + for_s))

    def release(self, name: str) -> None:
        self._in_passing(lambda cache: cache.unpin(name))

    async def keep(
        self, name: str, prefix: Chain | KeyedPrefix, for_s: float, *, owner: str
    ) -> Kept:
        until_s = time.time() + for_s
        try:
            pin = await self._operator.pin(name, prefix, until_s, "", owner=owner)
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
        return await self._operator.unpin(name)

    async def of_owner(self, owner: str) -> Sequence[Kept]:
        now_s, pins = await self._operator.pins_now()
        wall_s = time.time()
        return [_kept(pin, wall_s + pin.until_s - now_s) for pin in pins if pin.owner == owner]

    def _in_passing(self, work: Callable[[CacheOperations], object]) -> None:
        self._call(work).add_done_callback(_log_failure)


def _kept(pin: Pin[PrefixKey], expires_s: float) -> Kept:
    return Kept(pin, pin.name.removeprefix(f"{pin.owner}:"), expires_s)


def _log_failure(done: "Future[object]") -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.error("a prefix is not kept", exc_info=error)
