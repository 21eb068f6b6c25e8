"""What operators' commands ask of the tiers below memory, in an engine and in a node.

Below memory stands one tier, and only its writer thread changes it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from tiers.blocks.keys import BlockId, PrefixKey
from tiers.tier import ManagedTier, Removed
from tiers.transfer.mover import Mover, WriterTask

if TYPE_CHECKING:
    from tiers.memory.residency import Residency  # torch

T = TypeVar("T")
U = TypeVar("U")


def ask_writer(mover: Mover | None, work: Callable[[ManagedTier], T], without: T) -> "Future[T]":
    """Have the writer thread run `work` on the tier below; `without` if there is none."""
    if mover is None:
        return done(without)
    task = WriterTask(work)
    mover.submit(task)
    return task.result


def purge_below(tier: ManagedTier, roots: frozenset[PrefixKey]) -> tuple[Removed, int]:
    """Remove the scopes' blocks: what went, and how many are left. Writer thread."""
    return tier.purge(roots), tier.count(roots)


def trace(
    residency: "Residency", mover: Mover | None, keys: Sequence[PrefixKey]
) -> "Future[dict[PrefixKey, BlockId]]":
    """The identity of these blocks and of all before them, as far as they are held."""
    found: dict[PrefixKey, BlockId] = {}
    missing = [_walk(key, found, _in_memory(residency)) for key in keys]

    def trace_below(tier: ManagedTier) -> dict[PrefixKey, BlockId]:
        for key in missing:
            if key is not None:
                _walk(key, found, tier.trace)
        return found

    return ask_writer(mover, trace_below, found) if any(missing) else done(found)


def _in_memory(residency: "Residency") -> Callable[[PrefixKey], BlockId | None]:
    def identity(key: PrefixKey) -> BlockId | None:
        block = residency.index.get(key)
        return block.identity() if block is not None else None

    return identity


def _walk(
    key: PrefixKey, found: dict[PrefixKey, BlockId], identity: Callable[[PrefixKey], BlockId | None]
) -> PrefixKey | None:
    """Adds the blocks that end with `key` to `found`. Returns the first that is missing."""
    while key not in found:
        block = identity(key)
        if block is None:
            return key
        found[key], key = block, block.parent
        if block.parent == block.scope:
            return None
    return None


def then(
    future: "Future[T]", make: Callable[[T], U], wake: Callable[[], None] = lambda: None
) -> "Future[U]":
    """What `make` makes of a result, or its failure. Calls `wake` once it is there."""
    made: Future[U] = Future()

    def finish(ended: "Future[T]") -> None:
        if (error := ended.exception()) is not None:
            made.set_exception(error)
        else:
            made.set_result(make(ended.result()))
        wake()

    future.add_done_callback(finish)
    return made


def done(value: T) -> "Future[T]":
    """A future that already has its result."""
    future: Future[T] = Future()
    future.set_result(value)
    return future
