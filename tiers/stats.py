"""The cache's statistics: one snapshot, for metrics and pages. Any thread may read it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tiers.policy.quota import GroupUse
from tiers.telemetry.events import CacheEvent
from tiers.telemetry.transfers import Lane, TransferStats
from tiers.tier import TierName, TierStats


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot of the cache. The cache counts `device` and `host`. Each tier in `below` counts
    itself; a shared one counts this server's use of it."""

    device: TierStats
    host: TierStats
    below: tuple[TierStats, ...] = ()  # the tiers beneath memory, hottest first
    checkpoints: tuple[TierStats, ...] = ()  # of recurrent states, by tier, hottest first
    events: Mapping[tuple[TierName, CacheEvent], int] = field(default_factory=dict)
    transfers: Mapping[Lane, TransferStats] = field(default_factory=dict)
    num_loads: int = 0
    loads_refused: int = 0
    collisions: int = 0
    load_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    num_listeners: int = 0  # to the stream of block events
    events_missed: int = 0  # events dropped for slow listeners
    block_bytes: int = 0
    num_pins: int = 0
    pinned_blocks: int = 0
    pinnable_blocks: int = 0
    groups: Sequence[GroupUse] = ()

    @property
    def disk(self) -> TierStats | None:
        return next((tier for tier in self.below if tier.name is TierName.DISK), None)
