"""Replays a trace through LRU tiers, without tensors: what would hit, and what would move.

The rules are those of the server. A block counts as a hit only if all blocks before it in its
request hit. The last block of a request may be partial and counts the tokens it has. Used by
`cachesvc replay`, the benchmarks and the tests. One thread.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tiers.errors import ConfigurationError
from tiers.policy.admission import Demotion, WritePolicy, keeps_copies
from tiers.replay.trace import Trace, TraceRequest

GHOSTS_PER_BLOCK = 4  # ghosts of ON_SECOND_HIT per block of the tier above


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier to simulate."""

    name: str
    capacity_blocks: int


@dataclass(slots=True)
class TierReplay:
    """What one tier hit, took and gave up. A block still held below costs no write."""

    name: str
    capacity_blocks: int
    hit_tokens: int = 0
    written_blocks: int = 0
    evicted_blocks: int = 0


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a trace on a cache. `hit_tokens` is the sum over the tiers."""

    capacity_blocks: int
    tokens: int
    hit_tokens: int
    tiers: tuple[TierReplay, ...]

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0


class _Level:
    """A tier: the blocks it holds and their order.

    `spare` holds copies of promoted blocks in a tier that does not keep them: they leave first.
    Invariant: resident == blocks of the order + spare.
    """

    def __init__(self, plan: TierPlan, keeps: bool) -> None:
        self.counts = TierReplay(plan.name, plan.capacity_blocks)
        self.order: OrderedDict[Hashable, None] = OrderedDict()  # least recently used first
        self.keeps = keeps
        self.resident: set[Hashable] = set()
        self.spare: dict[Hashable, None] = {}

    @property
    def is_over(self) -> bool:
        return len(self.resident) > self.counts.capacity_blocks

    def add(self, key: Hashable) -> None:
        self.resident.add(key)
        self.counts.written_blocks += 1


class Hierarchy:
    """A stack of tiers. Each demotes what it evicts to the one below. The top tier takes every
    block of a request, whether computed or promoted."""

    def __init__(
        self,
        plans: Sequence[TierPlan],
        write_policy: WritePolicy = WritePolicy.ON_EVICT,
        keeps: bool | None = None,
    ) -> None:
        """`keeps` replaces the rule for copies below."""
        if not plans:
            raise ConfigurationError("a replay needs at least one tier")
        sizes = [plan.capacity_blocks for plan in plans]
        self._levels = [
            _Level(plan, keeps_copies(sum(sizes[:number]), sum(sizes)) if keeps is None else keeps)
            for number, plan in enumerate(plans)
        ]
        num_ghosts = GHOSTS_PER_BLOCK * plans[0].capacity_blocks
        self._demotion: Demotion[Hashable] = Demotion(write_policy, num_ghosts)
        self._write_early = write_policy is not WritePolicy.ON_EVICT and len(plans) > 1

    def serve(self, request: TraceRequest, block_tokens: int) -> None:
        """Run one request from lookup to release: count its hits, then release its chain, tail
        first.

        While it runs, its blocks are working memory on top of the capacity. When it ends, the tier
        shrinks back to its capacity.
        """
        sources = self._count_hits(request, block_tokens)
        chain = request.blocks
        top = self._levels[0]
        for depth in range(len(chain) - 1, -1, -1):
            key = chain[depth]
            if key in top.resident:
                top.order.move_to_end(key)
            else:
                top.add(key)
                top.order[key] = None
                if depth < len(sources):
                    self._promote(key, sources[depth])
            if self._write_early and self._demotion.on_use(key):
                self._put_below(0, key)
        while top.is_over:
            self._evict(0)

    def tiers(self) -> tuple[TierReplay, ...]:
        return tuple(level.counts for level in self._levels)

    def _count_hits(self, request: TraceRequest, block_tokens: int) -> list[int]:
        """The level that serves each of the leading blocks."""
        left = request.input_tokens
        sources: list[int] = []
        for key in request.blocks:
            for number, level in enumerate(self._levels):
                if key in level.resident:
                    level.counts.hit_tokens += min(block_tokens, left)
                    sources.append(number)
                    break
            else:
                break
            left = max(0, left - block_tokens)
        return sources

    def _promote(self, key: Hashable, source: int) -> None:
        """Move a block to the top. Levels between keep copies, just used or spare."""
        for number in range(source, 0, -1):
            level = self._levels[number]
            fresh = key not in level.resident
            if fresh:
                level.add(key)
            elif key in level.spare:
                continue
            if not level.keeps:
                if not fresh:
                    del level.order[key]
                level.spare[key] = None
            else:
                level.order[key] = None
                level.order.move_to_end(key)
            if level.is_over:
                self._evict(number)

    def _evict(self, number: int) -> None:
        """Evict the coldest block of a level. It goes to the next one if admission says so."""
        level = self._levels[number]
        if level.spare:
            key = next(iter(level.spare))
            del level.spare[key]
        else:
            key, _ = level.order.popitem(last=False)
            if self._demotion.on_evict(key):
                self._put_below(number, key)
        level.resident.discard(key)
        level.counts.evicted_blocks += 1

    def _put_below(self, number: int, key: Hashable) -> None:
        """Copy a block to the next level, if there is one. Free if that level holds it already."""
        if number + 1 == len(self._levels):
            return
        below = self._levels[number + 1]
        if key in below.spare:
            del below.spare[key]
        elif key in below.resident:
            below.order.move_to_end(key)
            return
        else:
            below.add(key)
        below.order[key] = None
        if below.is_over:
            self._evict(number + 1)


def replay(
    trace: Trace,
    plans: Sequence[TierPlan],
    *,
    keeps: bool | None = None,
    write_policy: WritePolicy = WritePolicy.ON_EVICT,
) -> ReplayResult:
    """Replay a whole trace. Raises ConfigurationError. `keeps` sets for all tiers whether promoted
    blocks keep their copies below, for comparison. None is the server's rule."""
    hierarchy = Hierarchy(plans, write_policy, keeps)
    for request in trace.requests:
        hierarchy.serve(request, trace.block_tokens)
    tiers = hierarchy.tiers()
    return ReplayResult(
        capacity_blocks=sum(plan.capacity_blocks for plan in plans),
        tokens=trace.input_tokens,
        hit_tokens=sum(tier.hit_tokens for tier in tiers),
        tiers=tiers,
    )
