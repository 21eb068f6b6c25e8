"""Removes every block of some scopes from every tier, for good, while the engine runs.

    block the scopes ─► running requests go private ─► memory ─► loads and stores under way end
         ─► the disk, on the writer thread ─► a second look at every tier ─► unblock them

A running request of these scopes keeps its blocks until it ends, and so does a node's lease. No
other request finds them, and they are not stored. A request that arrives during a purge is served
without the cache. The bytes of freed blocks are overwritten when their room is used again. The
thread of the engine or of the node.
"""

from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from tiers.blocks.keys import PrefixKey
from tiers.memory.block import Block
from tiers.memory.residency import Residency
from tiers.operations.below import purge_below
from tiers.telemetry.events import CacheEvent
from tiers.tier import Purged, Removed, TierName
from tiers.transfer.mover import Mover, WriterTask


@dataclass(slots=True, eq=False)
class _Purge:
    roots: frozenset[PrefixKey]
    pins: tuple[str, ...]
    counts: Counter[TierName]
    result: "Future[Purged]" = field(default_factory=Future)
    pending_free: list[Block] = field(default_factory=list)  # detached, but their frames are busy
    in_use: int = 0
    task: "WriterTask[tuple[Removed, int]] | None" = None


class Purger:
    """Purges under way. `detach` makes the running requests of some scopes private."""

    def __init__(
        self,
        residency: Residency,
        mover: Mover | None,
        unpin_scopes: Callable[[Collection[PrefixKey]], list[str]],
    ) -> None:
        self._residency = residency
        self._mover = mover
        self._unpin_scopes = unpin_scopes
        self._purges: list[_Purge] = []
        self.detach: Callable[[Collection[PrefixKey]], None] = lambda roots: None
        self.blocked: frozenset[PrefixKey] = frozenset()

    @property
    def is_active(self) -> bool:
        return bool(self._purges)

    @property
    def leaving(self) -> list[Block]:
        """Blocks that were removed, but whose frames are busy."""
        return [block for purge in self._purges for block in purge.pending_free]

    def start(self, roots: Collection[PrefixKey]) -> "Future[Purged]":
        """Begin a purge. A later step sets its result."""
        wanted = frozenset(roots)
        counts = Counter(dict.fromkeys(self._residency.tiers, 0))
        purge = _Purge(wanted, tuple(self._unpin_scopes(wanted)), counts)
        self._purges.append(purge)
        self.blocked |= wanted
        self.detach(wanted)
        for block in self._blocks_of(wanted):
            if block.slot is not None:
                purge.counts[TierName.DEVICE] += 1
            if block.frame is not None:
                purge.counts[TierName.HOST] += 1
            purge.in_use += block.ref_count > 0
            self._residency.detach(block)
            purge.pending_free.append(block)
        self.step()
        return purge.result

    def step(self) -> None:
        """Advance each purge as far as possible without waiting."""
        if self._purges:
            self._purges = [purge for purge in self._purges if not self._advance(purge)]
            self.blocked = frozenset(root for purge in self._purges for root in purge.roots)

    def _advance(self, purge: _Purge) -> bool:
        purge.pending_free = [b for b in purge.pending_free if not self._residency.discard(b)]
        if purge.pending_free:
            return False
        if self._mover is None:
            self._finish(purge, Removed(), 0)
            return True
        if purge.task is None:
            purge.task = WriterTask(lambda tier: purge_below(tier, purge.roots))
            self._mover.submit(purge.task)
        if not purge.task.result.done():
            return False
        error = purge.task.result.exception()
        if error is not None:
            purge.result.set_exception(error)
        else:
            self._finish(purge, *purge.task.result.result())
        return True

    def _finish(self, purge: _Purge, from_below: Removed, left_below: int) -> None:
        nbytes = self._residency.pool.layout.nbytes
        removed = {tier: Removed.whole(count, nbytes) for tier, count in purge.counts.items()}
        if self._mover is not None:
            below = self._mover.below
            removed[below] = from_below
            self._residency.counters.count(below, CacheEvent.PURGED, from_below.num_blocks)
        num_left = left_below + len(self._blocks_of(purge.roots))
        roots = tuple(sorted(purge.roots))
        purge.result.set_result(Purged(roots, removed, purge.in_use, purge.pins, num_left))

    def _blocks_of(self, roots: frozenset[PrefixKey]) -> list[Block]:
        index = self._residency.index
        return [block for block in [*index, *index.iter_partials()] if block.scope in roots]


def with_checkpoints(first: "Future[Purged]", second: "Future[Purged]") -> "Future[Purged]":
    """The first result with what the second removed and left. Fails if either does."""
    result: Future[Purged] = Future()

    def finish(_: "Future[Purged]") -> None:
        if not (first.done() and second.done()) or result.done():
            return
        error = first.exception() or second.exception()
        if error is not None:
            result.set_exception(error)
            return
        blocks, states = first.result(), second.result()
        num_left = blocks.num_left + states.num_left
        result.set_result(replace(blocks, num_left=num_left, checkpoints=states.removed))

    first.add_done_callback(finish)
    second.add_done_callback(finish)
    return result
