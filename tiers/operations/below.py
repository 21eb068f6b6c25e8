"""What operators do below memory, for both the embedded engine and a node.

Their memories differ, in slots and frames here and in leases there, so each has a part of its own
that comes first. What is below is one tier, and only its writer thread changes it.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from tiers.blocks.keys import PrefixKey
from tiers.tier import ManagedTier, Removed, TierName
from tiers.transfer.mover import Mover, WriterTask

T = TypeVar("T")


def ask_writer(mover: Mover | None, work: Callable[[ManagedTier], T], without: T) -> "Future[T]":
    """Let the writer thread do something to the tier below; `without` is the answer where there is
    none."""
    if mover is None:
        return done(without)
    task = WriterTask(work)
    mover.submit(task)
    return task.result


def evict_below(
    mover: Mover | None, removed: Mapping[TierName, int], loose: Sequence[PrefixKey]
) -> "Future[dict[TierName, int]]":
    """Remove these from below, but what is pinned by then; how many by tier, with those `removed`
    from memory. `loose` must leave out what memory still has: its users may count on the copy
    below."""
    return ask_writer(
        mover, lambda tier: {**removed, TierName.DISK: tier.discard(loose)}, dict(removed)
    )


def purge_below(tier: ManagedTier, roots: frozenset[PrefixKey]) -> tuple[Removed, int]:
    """The writer thread: what was removed, and how many blocks a second look finds."""
    return tier.purge(roots), tier.count(roots)


def done(value: T) -> "Future[T]":
    """A future that has its result."""
    future: Future[T] = Future()
    future.set_result(value)
    return future
