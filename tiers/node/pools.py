"""The pools of a node, one per block layout, over one capacity and one set of quotas.

A layout's pool, disk and operations are made on its first use. The node's thread only.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tiers.blocks.keys import PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.errors import NodeError, mib
from tiers.node import messages
from tiers.node.arena import create, frame_stride
from tiers.node.below import open_below, stats_below
from tiers.node.capacity import Capacity
from tiers.node.operations import PoolOperations, operations_on
from tiers.node.pool import Pool
from tiers.node.settings import NodeSettings
from tiers.node.spares import SpareFrames
from tiers.policy.owners import SCOPE, ScopeOwners
from tiers.policy.quota import Quotas
from tiers.telemetry.events import CacheEvent, EventStream
from tiers.tier import ManagedTier, TierName
from tiers.transfer.mover import Mover, WriterTask

MAX_POOLS = 16  # the most layouts that one node serves
MAX_OWNERS = 1 << 18  # the most scopes whose owners a node remembers
DRAIN_S = 30.0  # how long a stopping node writes blocks that only memory holds


@dataclass(slots=True, eq=False)
class _LayoutPool:
    pool: Pool
    below: ManagedTier | None
    operations: PoolOperations
    spares: SpareFrames


class NodePools:
    """`wake` wakes the node's thread and may be called from any thread. Raises ConfigurationError
    for quotas that promise more than there is."""

    def __init__(
        self, settings: NodeSettings, stream: EventStream, wake: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._stream = stream
        self._wake = wake
        self._owners = ScopeOwners(settings.disk_dir)
        self._shares = settings.shares(self._owners.of)
        quotas = Quotas(self._shares, settings.host_bytes) if self._shares is not None else None
        self.capacity = Capacity(settings.host_bytes, quotas)
        self._entries: list[_LayoutPool] = []

    def __len__(self) -> int:
        return len(self._entries)

    def pool(self, number: int) -> Pool:
        return self._entry(number).pool

    def operations(self, number: int) -> PoolOperations:
        return self._entry(number).operations

    def number_of(self, layout: BlockLayout) -> int:
        """The number of a layout's pool, made on its first use. Raises NodeError."""
        for number, entry in enumerate(self._entries):
            if entry.pool.memory.layout == layout:
                return number
        if len(self._entries) >= MAX_POOLS:
            raise NodeError(f"the node serves {MAX_POOLS} block layouts already; start another")
        num_frames = self._settings.host_bytes // frame_stride(layout)
        if not num_frames:
            raise NodeError(
                f"a block of {mib(layout.nbytes)} does not fit the node's "
                f"{mib(self._settings.host_bytes)} of host memory; raise its --host-cache"
            )
        self._entries.append(self._opened(layout, num_frames))
        return len(self._entries) - 1

    def work(self) -> None:
        """Process what the threads below have finished, and check pins."""
        for entry in self._entries:
            entry.pool.work()
            entry.operations.step()
            entry.spares.step(is_loading=entry.pool.is_loading)

    def leave(self, client: int) -> None:
        for entry in self._entries:
            entry.operations.leave(client)

    def know(self, owners: Mapping[PrefixKey, str]) -> None:
        """Learn the owners of these scopes and recount what they hold. Raises NodeError."""
        if len(self._owners.names().keys() | owners.keys()) > MAX_OWNERS:
            raise NodeError(f"the node keeps the owners of {MAX_OWNERS} scopes at most")
        if self._shares is None or not self._owners.learn(owners):
            return
        self.capacity.regroup()
        for entry in self._entries:
            if entry.pool.mover is not None:  # a flush counts what each scope holds
                entry.pool.mover.submit(WriterTask(lambda tier: tier.flush()))

    def stats(self) -> dict[str, Any]:
        return {
            "used_bytes": self.capacity.used_bytes,
            "capacity_bytes": self.capacity.capacity_bytes,
            "quotas": dict(self._settings.quotas),
            "groups": self._groups(),
            "pools": [_stats(entry) for entry in self._entries],
        }

    def close(self) -> None:
        """Write blocks that only memory holds, for at most `DRAIN_S`, and free everything."""
        pools = [entry.pool for entry in self._entries]
        until = time.monotonic() + DRAIN_S
        while any(pool.is_writing for pool in pools) and time.monotonic() < until:
            for pool in pools:
                pool.work()
            time.sleep(0.005)
        for entry in self._entries:
            if entry.pool.mover is not None:
                entry.pool.mover.close()
            entry.spares.close()
            entry.pool.memory.close()
            if entry.below is not None:
                entry.below.close()

    def _entry(self, number: int) -> _LayoutPool:
        if number >= len(self._entries):
            raise NodeError(f"there is no pool {number}; say HELLO first")
        return self._entries[number]

    def _opened(self, layout: BlockLayout, num_frames: int) -> _LayoutPool:
        below = None
        if self._settings.disk_dir is not None:
            below = open_below(self._settings, layout, self._shares, self._stream)
        mover = None
        if below is not None:
            mover = Mover(below, on_done=self._wake)
            # Beside busy processes a nicer thread keeps the GIL for long, and the node's answers.
            mover.start(writer_niceness=0)
        pool = Pool(
            create(layout, num_frames), self.capacity, mover, wake=self._wake, stream=self._stream
        )
        if below is not None:
            pool.used = below.used
        operations = operations_on(pool, below, self._settings)
        spares = SpareFrames(pool.arena, self._wake)
        spares.start()
        return _LayoutPool(pool, below, operations, spares)

    def _groups(self) -> list[dict[str, Any]]:
        """What each owner with a quota has in each tier. Unnamed scopes count as one."""
        if self.capacity.quotas is None:
            return []
        totals: dict[tuple[str, str], Counter[str]] = {}
        usages = [(TierName.HOST, self.capacity.quotas.usage())]
        belows = [entry.below for entry in self._entries if entry.below is not None]
        usages += [(below.name, dict(below.quotas())) for below in belows]
        for tier, usage in usages:
            for group, (used, share) in usage.items():
                name = "common" if group is None else str(group)
                place = (str(tier), "default" if name.startswith(SCOPE) else name)
                totals.setdefault(place, Counter()).update(used_bytes=used, share_bytes=share)
        return [{"tier": tier, "group": group, **sums} for (tier, group), sums in totals.items()]


def _stats(entry: _LayoutPool) -> dict[str, Any]:
    keeper, layout = entry.operations.keeper, entry.pool.memory.layout
    return {
        "layout": messages.describe_layout(layout),
        "num_blocks": entry.pool.residency.host.num_blocks,
        "locked_bytes": entry.pool.arena.num_locked_bytes,
        "evicted": entry.pool.count_of(CacheEvent.EVICTED),
        "lost": entry.pool.lost,
        "is_writing": entry.pool.is_writing,
        "num_pins": len(keeper.pins()),
        "pinned_blocks": keeper.num_blocks,
        "pinnable_blocks": keeper.max_blocks,
        **entry.pool.counts.as_json(),
        **stats_below(entry.below, layout),
    }
