"""Maintenance of shards: evict by rule, purge scopes. Safe beside a live server.

Each works in pages of PAGE_BLOCKS blocks with a short transaction for each, so that neither the
server's writes nor the reuse of its freed pages waits long. Called by the command line from a
process of its own, and by `DiskTier` from the server's.
"""

from collections.abc import Callable, Collection, Iterable, Iterator

from tiers.blocks.keys import PrefixKey
from tiers.disk.format.rows import IndexEntry
from tiers.disk.shard import Shard
from tiers.tier import Removed

PAGE_BLOCKS = 256

Rule = Callable[[PrefixKey, IndexEntry], bool]


def pages(shard: Shard) -> Iterator[list[tuple[PrefixKey, IndexEntry]]]:
    """Every block, in order of keys; a block stored meanwhile may be missed, none comes twice."""
    after: PrefixKey | None = None
    while rows := shard.entries(after, PAGE_BLOCKS):
        yield rows
        after = rows[-1][0]


def pages_by_age(shard: Shard) -> Iterator[list[tuple[PrefixKey, IndexEntry]]]:
    """Every block, the next to be evicted first."""
    after = 0
    while rows := shard.by_age(after, PAGE_BLOCKS):
        yield rows
        after = rows[-1][1].place.sequence


def remove(shard: Shard, rule: Rule, *, at_most_bytes: int | None = None) -> Removed:
    """Delete the blocks that `rule` names, oldest first, until `at_most_bytes` have gone."""
    total = Removed()
    for rows in pages_by_age(shard):
        to_delete = []
        for key, entry in rows:
            if at_most_bytes is not None and total.stored_bytes >= at_most_bytes:
                break
            if rule(key, entry):
                to_delete.append(key)
                total = total.plus(Removed(1, entry.place.nbytes, entry.logical_nbytes))
        delete(shard, to_delete)
    return total


def delete(shard: Shard, keys: list[PrefixKey]) -> int:
    """Forget these blocks, in as many transactions as it takes; how many were held."""
    num_held = 0
    while keys:
        with shard.writing() as writer:
            num_held += writer.delete_some(keys)
    return num_held


def purge(shards: Iterable[Shard], roots: Collection[PrefixKey]) -> Removed:
    """Delete every block of these scopes, also those stored while it runs, as far as it can see."""
    wanted = frozenset(roots)
    total = Removed()
    for shard in shards:
        while (removed := remove(shard, lambda _, entry: entry.scope in wanted)).num_blocks:
            total = total.plus(removed)
        shard.sync()
    return total


def count(shards: Iterable[Shard], roots: Collection[PrefixKey]) -> int:
    """How many blocks of these scopes are held, by their own headers."""
    wanted = frozenset(roots)
    return sum(e.scope in wanted for shard in shards for rows in pages(shard) for _, e in rows)
