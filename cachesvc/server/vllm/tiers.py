"""The operators' face of a server whose blocks are in vLLM and in a node, and its counters.

This process has no blocks. What operators see comes from vLLM and the node, and what they change is
changed in the node.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Protocol

from cachesvc.server.vllm.node import NodeWatch
from cachesvc.server.vllm.node_operations import ElsewhereError, NodeOperations
from tiers.blocks.chain import Chain, KeyedPrefix
from tiers.blocks.keys import PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.node.counters import NodeCounters
from tiers.operations.below import done
from tiers.operations.purge import Purged
from tiers.policy.retention import Pin, PinError
from tiers.stats import CacheStats
from tiers.steady_clock import SteadyClock
from tiers.tier import TierName, TierStats


class KvUsage(Protocol):
    @property
    def kv_usage(self) -> float:
        """How much of the engine's own cache is in use, 0 to 1."""
        ...


class OperationsElsewhere:
    """A `CacheOperations` of the node below vLLM; `node` is None if there is none."""

    def __init__(self, node: NodeOperations | None) -> None:
        self._node = node
        self._clock = SteadyClock()

    @property
    def now_s(self) -> float:
        return self._clock()

    def pin(
        self,
        name: str,
        prefix: Chain | KeyedPrefix,
        until_s: float,
        why: str = "",
        *,
        owner: str = "",
    ) -> Pin[PrefixKey]:
        if self._node is None:
            raise PinError("pins need a node below vLLM; set cache.host_bytes")
        return self._node.pins.pin(name, prefix, until_s - self.now_s, why, owner)

    def unpin(self, name: str) -> bool:
        return self._node.pins.unpin(name) if self._node is not None else False

    def pins(self) -> list[Pin[PrefixKey]]:
        return self._node.pins.pins() if self._node is not None else []

    def saved(self) -> "Future[None]":
        return self._node.saved() if self._node is not None else done(None)

    def publish(self, chain: Chain) -> "Future[int]":
        return done(0) if self._node is None or chain.private else self._node.publish(chain)

    def evict(self, keys: Sequence[PrefixKey]) -> "Future[dict[TierName, int]]":
        return self._reached().evict(keys)

    def purge(self, roots: Collection[PrefixKey]) -> "Future[Purged]":
        return self._reached().purge(roots)

    def _reached(self) -> NodeOperations:
        if self._node is None:
            raise ElsewhereError(
                "only vLLM keeps blocks, and there is no node below it: restart this server"
            )
        return self._node


def cache_stats(
    layout: BlockLayout,
    engine: KvUsage,
    node: NodeWatch | None,
    num_device_blocks: int,
) -> CacheStats:
    """Stats with vLLM's own cache as device, and the node's host and disk, which all its users
    share."""
    nbytes = layout.nbytes
    used = round(engine.kv_usage * num_device_blocks)
    counters = node.counters if node is not None else NodeCounters()
    return CacheStats(
        device=TierStats(
            name=TierName.DEVICE,
            num_blocks=used,
            used_bytes=used * nbytes,
            logical_bytes=used * nbytes,
            capacity_bytes=num_device_blocks * nbytes,
        ),
        host=counters.host(),
        below=counters.below(),
        events=counters.events(),
        collisions=counters.total("collisions"),
        num_listeners=counters.num_listeners,
        block_bytes=nbytes,
        num_pins=counters.total("num_pins"),
        pinned_blocks=counters.total("pinned_blocks"),
        pinnable_blocks=counters.total("pinnable_blocks"),
        groups=counters.groups(),
    )
