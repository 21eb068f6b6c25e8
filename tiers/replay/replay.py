"""Replays a trace through tiers of policies, without tensors: what would hit, and what would move.

The policies and rules are those of the server. A block counts as a hit only if all blocks before it
in its request hit. The last block of a request may be partial and counts the tokens it has. Used by
`cachesvc replay`, the benchmarks and the tests. One thread.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tiers.errors import ConfigurationError
from tiers.policy.admission import Demotion, WritePolicy, keeps_copies
from tiers.policy.policy import Policy, Use
from tiers.policy.registry import make_policy
from tiers.replay.belady import Belady, future_uses
from tiers.replay.trace import Trace, TraceRequest

MIN = "min"  # Belady's policy, for a single tier
GHOSTS_PER_BLOCK = 4  # ghosts of ON_SECOND_HIT per block of the tier above

Progress = Callable[[int], None]  # called with the number of requests done since the last call
_PROGRESS_STEP = 256


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier to simulate."""

    name: str
    capacity_blocks: int
    policy: str = "lru"


@dataclass(frozen=True, slots=True)
class TierReplay:
    """The result for one tier. A block still held below costs no write when it is demoted again."""

    name: str
    capacity_blocks: int
    hit_tokens: int
    hit_blocks: int
    written_blocks: int
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a trace on a cache. `hit_tokens` is the sum over the tiers."""

    policy: str
    capacity_blocks: int
    tokens: int
    hit_tokens: int
    num_requests: int
    num_accesses: int
    tiers: tuple[TierReplay, ...]

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0


@dataclass(slots=True, eq=False)
class _Block:
    """A block's place in its chain, and its last use."""

    parent: Hashable | None
    depth: int
    use: Use


class _Level:
    """A tier: the blocks it holds and the policy that orders them.

    `spare` holds copies of promoted blocks in a tier that does not keep them: they leave first.
    Invariant: resident == blocks the policy knows + spare.
    """

    def __init__(self, plan: TierPlan, policy: Policy[Any], keeps: bool) -> None:
        self.plan = plan
        self.policy = policy
        self.keeps = keeps
        self.resident: set[Hashable] = set()
        self.spare: dict[Hashable, None] = {}
        self.hit_tokens = self.hit_blocks = self.written = self.evicted = 0

    def summary(self) -> TierReplay:
        return TierReplay(
            self.plan.name,
            self.plan.capacity_blocks,
            self.hit_tokens,
            self.hit_blocks,
            self.written,
            self.evicted,
        )


class Hierarchy:
    """A stack of tiers. Each demotes what it evicts to the one below.

    The top tier takes every block of a request, whether computed or promoted.
    """

    def __init__(
        self,
        plans: Sequence[TierPlan],
        write_policy: WritePolicy = WritePolicy.ON_EVICT,
        policies: Sequence[Policy[Any]] = (),
        keeps: bool | None = None,
    ) -> None:
        """`policies` replaces the policies that the plans name. `keeps` replaces the rule for
        copies below."""
        made = policies or [make_policy(plan.policy, plan.capacity_blocks) for plan in plans]
        sizes = [plan.capacity_blocks for plan in plans]
        self._levels = [
            _Level(plan, policy, _keeps(sizes, number) if keeps is None else keeps)
            for number, (plan, policy) in enumerate(zip(plans, made, strict=True))
        ]
        self._blocks: dict[Hashable, _Block] = {}
        num_ghosts = GHOSTS_PER_BLOCK * plans[0].capacity_blocks
        self._demotion: Demotion[Hashable] = Demotion(write_policy, num_ghosts)
        self._keeps_origins = len(plans) > 1
        self._write_early = write_policy is not WritePolicy.ON_EVICT and len(plans) > 1

    def serve(self, request: TraceRequest, block_tokens: int) -> None:
        """Run one request from lookup to release: count its hits, then release its chain, tail
        first.

        While it runs, its blocks are working memory on top of the capacity, so a policy may keep
        none of them.
        """
        sources = self._count_hits(request, block_tokens)
        chain = request.blocks
        use = Use(request.time_s, len(chain), request.tenant)
        top = self._levels[0]
        for depth in range(len(chain) - 1, -1, -1):
            key = chain[depth]
            parent = chain[depth - 1] if depth else None
            if key in top.resident:
                top.policy.touch(key, use)
            else:
                top.resident.add(key)
                top.written += 1
                top.policy.insert(key, use, parent, depth)
                self._blocks[key] = _Block(parent, depth, use)
                if depth < len(sources):
                    self._promote(key, sources[depth])
            if self._keeps_origins:
                self._blocks[key] = _Block(parent, depth, use)
                if self._write_early and self._demotion.on_use(key):
                    self._put_below(0, key)
        while len(top.resident) > top.plan.capacity_blocks:
            self._evict(0)

    def held(self, blocks: Sequence[Hashable]) -> int:
        """How many of the leading blocks are held now, in any tier."""
        for depth, key in enumerate(blocks):
            if not any(key in level.resident for level in self._levels):
                return depth
        return len(blocks)

    def tiers(self) -> tuple[TierReplay, ...]:
        return tuple(level.summary() for level in self._levels)

    def _count_hits(self, request: TraceRequest, block_tokens: int) -> list[int]:
        """The level that serves each of the leading blocks."""
        left = request.input_tokens
        sources: list[int] = []
        for key in request.blocks:
            for number, level in enumerate(self._levels):
                if key in level.resident:
                    level.hit_blocks += 1
                    level.hit_tokens += min(block_tokens, left)
                    sources.append(number)
                    break
            else:
                break
            left = max(0, left - block_tokens)
        return sources

    def _promote(self, key: Hashable, source: int) -> None:
        """Move a block to the top through every level between. Each keeps a copy, which counts as
        just used or is spare."""
        block = self._blocks[key]
        for number in range(source, 0, -1):
            level = self._levels[number]
            fresh = key not in level.resident
            if fresh:
                level.resident.add(key)
                level.written += 1
            elif key in level.spare:
                continue
            if not level.keeps:
                if not fresh:
                    level.policy.remove(key)
                level.spare[key] = None
            elif fresh:
                level.policy.insert(key, block.use, block.parent, block.depth)
            else:
                level.policy.touch(key, block.use)
            if len(level.resident) > level.plan.capacity_blocks:
                self._evict(number)

    def _evict(self, number: int) -> None:
        """Evict the coldest block of a level. It goes to the next one if admission says so."""
        level = self._levels[number]
        if level.spare:
            key = next(iter(level.spare))
            del level.spare[key]
        else:
            key = level.policy.victim()
            assert key is not None, f"{level.plan.name} is full and its policy knows no block"
            if self._demotion.on_evict(key):
                self._put_below(number, key)
        level.resident.discard(key)
        level.evicted += 1

    def _put_below(self, number: int, key: Hashable) -> None:
        """Copy a block to the next level, if there is one. Free if that level holds it already."""
        if number + 1 == len(self._levels):
            return
        below = self._levels[number + 1]
        block = self._blocks[key]
        if key in below.spare:
            del below.spare[key]
        elif key in below.resident:
            below.policy.touch(key, block.use)
            return
        else:
            below.resident.add(key)
            below.written += 1
        below.policy.insert(key, block.use, block.parent, block.depth)
        if len(below.resident) > below.plan.capacity_blocks:
            self._evict(number + 1)


def replay(
    trace: Trace,
    plans: Sequence[TierPlan],
    *,
    keeps: bool | None = None,
    write_policy: WritePolicy = WritePolicy.ON_EVICT,
    progress: Progress = lambda num_requests: None,
) -> ReplayResult:
    """Replay a whole trace. Raises ConfigurationError. The policy `min` works only for a single
    tier.

    `keeps` sets for all tiers whether promoted blocks keep their copies below, for comparison. None
    is the server's rule.
    """
    hierarchy = Hierarchy(plans, write_policy, _clairvoyant(trace, plans), keeps)
    pending = 0
    for request in trace.requests:
        hierarchy.serve(request, trace.block_tokens)
        pending += 1
        if pending == _PROGRESS_STEP:
            progress(pending)
            pending = 0
    progress(pending)
    tiers = hierarchy.tiers()
    return ReplayResult(
        policy=_joined(plan.policy for plan in plans),
        capacity_blocks=sum(plan.capacity_blocks for plan in plans),
        tokens=trace.input_tokens,
        hit_tokens=sum(tier.hit_tokens for tier in tiers),
        num_requests=len(trace.requests),
        num_accesses=trace.num_accesses,
        tiers=tiers,
    )


def _keeps(sizes: Sequence[int], number: int) -> bool:
    return keeps_copies(sum(sizes[:number]), sum(sizes))


def check_plans(plans: Sequence[TierPlan]) -> None:
    """Raise ConfigurationError for plans that cannot be simulated."""
    if not plans:
        raise ConfigurationError("a replay needs at least one tier")
    for plan in plans:
        if plan.capacity_blocks < 1:
            raise ConfigurationError(
                f"the tier {plan.name} would hold {plan.capacity_blocks} blocks; it needs at "
                f"least one"
            )
        if plan.policy == MIN and len(plans) > 1:
            raise ConfigurationError(
                "min knows the future of a single tier only; replay it with one tier"
            )


def _clairvoyant(trace: Trace, plans: Sequence[TierPlan]) -> Sequence[Policy[Any]]:
    """The policies that know the trace, if the plan names one. Otherwise none."""
    check_plans(plans)
    if plans[0].policy != MIN:
        return ()
    return [Belady(future_uses(request.blocks for request in trace.requests if request.blocks))]


def _joined(names: Iterable[str]) -> str:
    """One name if all are the same, otherwise all names."""
    distinct = list(dict.fromkeys(names))
    return "+".join(distinct)
