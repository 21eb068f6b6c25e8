"""Operators' commands on memory and on the tiers below it, in an engine and in a node.

Below memory stands one tier, and only its writer thread changes it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from tiers.blocks.keys import PrefixKey
from tiers.memory.residency import Residency
from tiers.tier import ManagedTier, Removed, TierName
from tiers.transfer.mover import Mover, WriterTask

T = TypeVar("T")


def ask_writer(mover: Mover | None, work: Callable[[ManagedTier], T], without: T) -> "Future[T]":
    """Have the writer thread run `work` on the tier below. `without` is the answer if there is no
    tier."""
    if mover is None:
        return done(without)
    task = WriterTask(work)
    mover.submit(task)
    return task.result


def evict(
    residency: Residency, mover: Mover | None, keys: Sequence[PrefixKey]
) -> "Future[dict[TierName, int]]":
    """Remove blocks from every tier, except those in use or pinned. Returns how many were removed,
    by tier.

    Below, blocks that memory still has are left out: their users may count on the copy there.
    """
    removed: dict[TierName, int] = dict.fromkeys(residency.tiers, 0)
    index = residency.index
    for key in keys:
        block = index.get(key)
        if block is not None and not (block.ref_count or block.busy or block.pinned):
            if block.slot is not None:
                removed[TierName.DEVICE] += 1
            if block.frame is not None:
                removed[TierName.HOST] += 1
            residency.forget_everywhere(block)
    loose = [key for key in keys if index.get(key) is None]
    return ask_writer(mover, lambda tier: {**removed, tier.name: tier.discard(loose)}, removed)


def purge_below(tier: ManagedTier, roots: frozenset[PrefixKey]) -> tuple[Removed, int]:
    """Remove the scopes' blocks. Returns what was removed, and how many blocks a second look finds.
    Writer thread."""
    return tier.purge(roots), tier.count(roots)


def done(value: T) -> "Future[T]":
    """A future that already has its result."""
    future: Future[T] = Future()
    future.set_result(value)
    return future
