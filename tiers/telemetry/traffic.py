"""How much cache the live traffic would need: what requests ask for, followed after the fact.

A lookup leaves its keys here, which costs it one copy of a list; they are followed between steps,
in bounded room: what does not fit is dropped and counted. Engine thread only.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from tiers.blocks.keys import PrefixKey
from tiers.telemetry.working_set import MissRatioCurve, WorkingSet
from tiers.tier import TierName

MAX_WAITING = 1024  # lookups; a step has rarely more than a few


@dataclass(frozen=True, slots=True)
class TierPoint:
    """A tier and all above it as one cache: how many blocks, and what an LRU of them would hit."""

    tier: TierName
    capacity_blocks: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """The curve of hit rate against capacity, and where the tiers are on it."""

    curve: MissRatioCurve
    tiers: tuple[TierPoint, ...]
    num_uses: int  # blocks asked for
    num_dropped: int  # lookups that were not followed
    sampled: float  # share of the blocks that is followed
    block_tokens: int
    block_bytes: int


class Traffic:
    """Feeds a `WorkingSet` from lookups and from blocks that were generated."""

    def __init__(self, max_samples: int = 4096) -> None:
        self._working_set = WorkingSet(max_samples)
        self._waiting: deque[list[PrefixKey]] = deque()
        self.num_dropped = 0

    def asked(self, keys: list[PrefixKey]) -> None:
        """A request looked these up."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(keys[:])
        else:
            self.num_dropped += 1

    def made(self, key: PrefixKey) -> None:
        """A block was generated: a later request finds it, though nobody asked for it yet."""
        self._working_set.made(key)

    def step(self) -> None:
        """Follow what was asked since the last step."""
        while self._waiting:
            self._working_set.use_all(self._waiting.popleft())

    def report(
        self, capacities: Mapping[TierName, int], *, block_tokens: int, block_bytes: int
    ) -> TrafficReport:
        """`capacities`: blocks of each tier, hottest first."""
        self.step()
        curve = self._working_set.curve()
        points, total = [], 0
        for tier, blocks in capacities.items():
            total += blocks
            points.append(TierPoint(tier, total, curve.hit_rate(total)))
        return TrafficReport(
            curve=curve,
            tiers=tuple(points),
            num_uses=self._working_set.num_uses,
            num_dropped=self.num_dropped,
            sampled=self._working_set.rate,
            block_tokens=block_tokens,
            block_bytes=block_bytes,
        )
