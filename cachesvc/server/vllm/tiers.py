"""What stands for the tiers in a server whose blocks are in vLLM and in a node.

Reads like an empty cache, so that every page and command works; its counters are vLLM's and the
node's. What would change blocks is refused, with what to do instead: a purge that removed nothing
must not say that it is done.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace

from cachesvc.server.vllm.counts import Counts
from cachesvc.server.vllm.node import NodeWatch
from engine.errors import EngineError
from tiers.blocks.chain import Chain
from tiers.blocks.keys import PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.cache import CacheSettings, CacheStats, TieredCache
from tiers.operations.purge import Purged
from tiers.policy.retention import Pin, PinError
from tiers.telemetry.events import EventStream
from tiers.tier import TierName, TierStats


class ElsewhereError(EngineError):
    """Blocks are not in this process; the message says where."""


class TiersElsewhere(TieredCache):
    """An empty cache of vLLM's block layout."""

    def __init__(self, layout: BlockLayout, stream: EventStream) -> None:
        settings = CacheSettings(device_bytes=2 * layout.nbytes, host_bytes=0)
        super().__init__(layout, settings, stream=stream)

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
        raise PinError("pins are not kept with vLLM as the engine: its node evicts by use alone")

    def evict(self, keys: Sequence[PrefixKey]) -> "Future[dict[TierName, int]]":
        raise ElsewhereError("with vLLM as the engine, blocks are evicted for room alone")

    def purge(self, roots: Collection[PrefixKey]) -> "Future[Purged]":
        raise ElsewhereError(
            "with vLLM as the engine, a purge means all blocks: stop this server, end its node "
            "with cachesvc node --stop, and remove the node's disk folder"
        )


def cache_stats(
    empty: TieredCache,
    counts: Counts,
    node: NodeWatch | None,
    num_device_blocks: Callable[[], int],
) -> CacheStats:
    """The device is vLLM's own cache; host and disk are the node's, whoever uses it."""
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
    return replace(
        stats,
        host=node.host(),
        disk=node.disk(),
        remote=node.remote(),
        collisions=node.collisions,
    )
