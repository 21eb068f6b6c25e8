"""A node's counters as clients read them: the tiers of all layouts added together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tiers.errors import MissReason
from tiers.node.messages import TIERS
from tiers.policy.quota import GroupUse
from tiers.telemetry.events import CacheEvent
from tiers.tier import ShardStats, TierName, TierStats

SUMS = ("num_blocks", "used_bytes", "capacity_bytes", "stored", "evicted")
COMMON = "common"  # the node's name for the owners without a quota


class NodeCounters:
    """One answer of `NodeClient.stats`. Empty if the node is away."""

    def __init__(self, answer: Mapping[str, Any] | None = None) -> None:
        self._answer = answer or {}

    def __bool__(self) -> bool:
        return bool(self._answer)

    @property
    def pools(self) -> Sequence[Mapping[str, Any]]:
        pools: Sequence[Mapping[str, Any]] = self._answer.get("pools", ())
        return pools

    @property
    def quotas(self) -> Mapping[str, int]:
        quotas: Mapping[str, int] = self._answer.get("quotas", {})
        return quotas

    @property
    def num_listeners(self) -> int:
        return int(self._answer.get("num_listeners", 0))

    @property
    def is_shared(self) -> bool:
        """Whether a store that machines share stands below the node."""
        return any(TierName.REMOTE in pool for pool in self.pools)

    def total(self, counter: str) -> int:
        return sum(pool[counter] for pool in self.pools)

    def host(self) -> TierStats:
        """The node's memory. Engines share it, so it counts the blocks of all."""
        used = self._answer.get("used_bytes", 0)
        return TierStats(
            name=TierName.HOST,
            num_blocks=self.total("num_blocks"),
            used_bytes=used,
            logical_bytes=used,
            capacity_bytes=self._answer.get("capacity_bytes", 0),
            hits=self.total("host_hits"),
            stored=self.total("stored"),
            evicted=self.total("evicted"),
        )

    def below(self) -> tuple[TierStats, ...]:
        """The tiers beneath the node's memory, hottest first."""
        found = []
        for tier in TIERS[1:]:
            stats = [pool[tier] for pool in self.pools if tier in pool]
            if stats:
                faults: Counter[MissReason] = Counter()
                for each in stats:
                    faults.update({MissReason(why): num for why, num in each["faults"].items()})
                total = {name: sum(each[name] for each in stats) for name in SUMS}
                hits = self.total(f"{tier}_hits")
                shards = tuple(
                    ShardStats(**shard) for each in stats for shard in each.get("shards", ())
                )
                found.append(TierStats(name=tier, hits=hits, faults=faults, shards=shards, **total))
        return tuple(found)

    def events(self) -> dict[tuple[TierName, CacheEvent], int]:
        return {
            (TierName.HOST, event): self.total(str(event))
            for event in (CacheEvent.STORED, CacheEvent.EVICTED, CacheEvent.LOST)
        }

    def groups(self) -> list[GroupUse]:
        """What each owner with a quota has in each tier. Empty without quotas."""
        return [
            GroupUse(
                TierName(each["tier"]),
                None if each["group"] == COMMON else each["group"],
                each["used_bytes"],
                each["share_bytes"],
            )
            for each in self._answer.get("groups", ())
        ]
