"""What admins do to the cache: pin a prefix, end a pin, evict a prefix, purge a tenant.

Each is done by the tiers between two steps of the engine; here a key becomes the prefix that leads
to it, or what continues it, and a name the scopes behind it. Event loop; the routes that call this
write the audit entry.
"""

import asyncio
from concurrent.futures import Future
from typing import Any

from api.errors import BlockNotFound, InvalidRequest
from api.explorer import Explorer
from api.owners import Owners
from tiers.cache import TieredCache
from tiers.keys import PrefixKey
from tiers.retention import Pin, PinError
from tiers.tier import TierName
from tiers.whole_tree import Forest

MAX_REMOVED = 20_000  # blocks of one eviction


class Keeping:
    """Changes what is cached. Raises BlockNotFound for what is nowhere held."""

    def __init__(self, explorer: Explorer, owners: Owners) -> None:
        self._explorer = explorer
        self._owners = owners

    async def pins(self) -> list[Pin[PrefixKey]]:
        return await self._explorer.on_engine(lambda cache: cache.pins())

    async def pin(self, name: str, key: PrefixKey, until_s: float, why: str) -> Pin[PrefixKey]:
        """Keep the prefix that ends with block `key` until a moment (Unix seconds).

        Raises InvalidRequest where the tiers refuse it: too many blocks, a moment gone by.
        """
        detail, _ = await self._explorer.block(key)
        if not detail.complete:
            raise BlockNotFound("A block before this one is gone: it cannot be hit or kept.")
        try:
            return await self._explorer.on_engine(
                lambda cache: cache.pin(name, detail.trail, until_s, why, scope=detail.scope)
            )
        except PinError as error:
            raise InvalidRequest(str(error)) from error

    async def unpin(self, name: str) -> bool:
        """End a pin; whether there was one."""
        return await self._explorer.on_engine(lambda cache: cache.unpin(name))

    async def evict(self, key: PrefixKey, *, whole_run: bool = False) -> dict[TierName, int]:
        """Remove a block and all that continues it from every tier, but what is in use or pinned;
        with `whole_run` also the blocks before it that nothing parts from.

        Returns how many blocks were removed by tier.
        """
        detail, _ = await self._explorer.block(key)
        if whole_run:
            key = detail.trail[-detail.run]
        disk = await self._explorer.fresh_disk(0.0)

        def remove(cache: TieredCache) -> "Future[dict[TierName, int]]":
            keys = Forest(cache.index, disk).below(key, MAX_REMOVED)
            return cache.evict(keys[::-1])  # what continues a prefix goes before it

        removing = await self._explorer.on_engine(remove)
        removed = await asyncio.wrap_future(removing)
        self._explorer.forget_disk()
        return removed

    async def purge(self, name: str) -> dict[str, Any]:
        """Remove every block of a tenant or group, in all models, from every tier.

        Says of each tier how many blocks went, how many running requests still use, and how many a
        look at all of them found left, which are none.
        """
        roots = await asyncio.to_thread(self._owners.roots_of, name)
        if not roots:
            raise BlockNotFound(f"There is no tenant or group '{name[:64]}'.")
        purging = await self._explorer.on_engine(lambda cache: cache.purge(roots))
        purged = await asyncio.wrap_future(purging)
        self._explorer.forget_disk()
        removed = {str(tier): each.num_blocks for tier, each in purged.removed.items()}
        return {"removed": removed, "in_use": purged.in_use, "left": purged.num_left}
