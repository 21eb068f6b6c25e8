"""Operators' commands on the tiers below memory, for both the embedded engine and a node.

Their memories differ: the engine has slots and frames, the node has leases. Each handles its own
memory first. Below that stands one tier, and only its writer thread changes it.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from tiers.blocks.keys import PrefixKey
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


def evict_below(
    mover: Mover | None, removed: Mapping[TierName, int], loose: Sequence[PrefixKey]
) -> "Future[dict[TierName, int]]":
    """Remove blocks from below, except those pinned by then. Returns how many were removed by tier,
    with those `removed` from memory.

    `loose` must leave out blocks that memory still has: their users may count on the copy below.
    """
    return ask_writer(
        mover, lambda tier: {**removed, tier.name: tier.discard(loose)}, dict(removed)
    )


def purge_below(tier: ManagedTier, roots: frozenset[PrefixKey]) -> tuple[Removed, int]:
    """Remove the scopes' blocks. Returns what was removed, and how many blocks a second look finds.
    Writer thread."""
    return tier.purge(roots), tier.count(roots)


def done(value: T) -> "Future[T]":
    """A future that already has its result."""
    future: Future[T] = Future()
    future.set_result(value)
    return future
