"""The stand-in for the tiers in a server whose blocks are in vLLM and in a node.

It reads like an empty cache, so that every page and command works. Its counters come from vLLM and
the node. Changes go to the node.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace

from cachesvc.server.vllm.counts import Counts
from cachesvc.server.vllm.node import NodeWatch
from cachesvc.server.vllm.operations import ElsewhereError, NodeOperations
from tiers.blocks.chain import Chain
from tiers.blocks.keys import PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.cache import CacheSettings, TieredCache
from tiers.operations.purge import Purged
from tiers.policy.retention import Pin, PinError
from tiers.stats import CacheStats
from tiers.telemetry.events import EventStream
from tiers.tier import TierName, TierStats


class TiersElsewhere(TieredCache):
    """An empty cache of vLLM's block layout.

    `operations` are the node's, or None.
    """

    def __init__(
        self, layout: BlockLayout, stream: EventStream, operations: NodeOperations | None
    ) -> None:
        settings = CacheSettings(device_bytes=2 * layout.nbytes, host_bytes=0)
        super().__init__(layout, settings, stream=stream)
        self._operations = operations

    def pin(
        self,
        name: str,
        prefix: Chain | Sequence[PrefixKey],
        until_s: float,
        why: str = "",
        *,
        scope: PrefixKey | None = None,
        owner: str = "",
    ) -> Pin[PrefixKey]:
        if self._operations is None:
            raise PinError("pins need a node below vLLM; set cache.host_bytes")
        keys = prefix.keys if isinstance(prefix, Chain) else list(prefix)
        root = prefix.root if isinstance(prefix, Chain) else scope
        if root is None:
            raise PinError(f"the scope of {name!r} is unknown here; give its root")
        return self._operations.pin(name, root, keys, until_s - self.now_s, why, owner)

    def unpin(self, name: str) -> bool:
        return self._operations.unpin(name) if self._operations is not None else False

    def pins(self) -> list[Pin[PrefixKey]]:
        return self._operations.pins() if self._operations is not None else []

    def saved(self) -> "Future[None]":
        return self._operations.saved() if self._operations is not None else super().saved()

    def publish(self, chain: Chain) -> "Future[int] | None":
        if self._operations is None or chain.private:
            return super().publish(chain)
        return self._operations.publish(chain)

    def evict(self, keys: Sequence[PrefixKey]) -> "Future[dict[TierName, int]]":
        return self._hands.evict(keys)

    def purge(self, roots: Collection[PrefixKey]) -> "Future[Purged]":
        return self._hands.purge(roots)

    @property
    def _hands(self) -> NodeOperations:
        if self._operations is None:
            raise ElsewhereError(
                "only vLLM keeps blocks, and there is no node below it: restart this server"
            )
        return self._operations


def cache_stats(
    empty: TieredCache,
    counts: Counts,
    node: NodeWatch | None,
    num_device_blocks: Callable[[], int],
) -> CacheStats:
    """Stats with vLLM's own cache as device, and the node's host and disk, which all its users
    share."""
    nbytes, capacity = empty.layout.nbytes, num_device_blocks()
    used = round(counts.kv_usage * capacity)
    device = TierStats(
        name=TierName.DEVICE,
        num_blocks=used,
        used_bytes=used * nbytes,
        logical_bytes=used * nbytes,
        capacity_bytes=capacity * nbytes,
    )
    stats = replace(empty.stats(), device=device)
    if node is None:
        return stats
    told = node.counters
    return replace(
        stats,
        host=told.host(),
        disk=told.disk(),
        remote=told.remote(),
        events=told.events(),
        collisions=told.total("collisions"),
        num_pins=told.total("num_pins"),
        pinned_blocks=told.total("pinned_blocks"),
        pinnable_blocks=told.total("pinnable_blocks"),
        groups=told.groups(),
    )
