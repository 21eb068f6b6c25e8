"""What operators' commands ask of the tiers below memory, in an engine and in a node.

Below memory stands one tier, and only its writer thread changes it.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from tiers.blocks.keys import PrefixKey
from tiers.tier import ManagedTier, Removed
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


def purge_below(tier: ManagedTier, roots: frozenset[PrefixKey]) -> tuple[Removed, int]:
    """Remove the scopes' blocks. Returns what was removed, and how many blocks a second look finds.
    Writer thread."""
    return tier.purge(roots), tier.count(roots)


def done(value: T) -> "Future[T]":
    """A future that already has its result."""
    future: Future[T] = Future()
    future.set_result(value)
    return future
