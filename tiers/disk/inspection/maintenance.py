"""Maintenance of shards: evict by rule, purge scopes. Safe beside a running server.

Each works in pages of PAGE_BLOCKS blocks with a short transaction per page, so that neither the
server's writes nor the reuse of freed pages waits long. Called by the command line from its own
process, and by `DiskTier` in the server.
"""

from collections.abc import Callable, Collection, Iterable, Iterator

from tiers.blocks.keys import PrefixKey
from tiers.disk.format.rows import IndexEntry
from tiers.disk.shard import Shard
from tiers.tier import Removed

PAGE_BLOCKS = 256

Rule = Callable[[PrefixKey, IndexEntry], bool]


def pages(shard: Shard) -> Iterator[list[tuple[PrefixKey, IndexEntry]]]:
    """Every block, in order of keys. A block stored meanwhile may be missed; none comes twice."""
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
    """Deletes the blocks selected by `rule`, oldest first, up to `at_most_bytes`."""
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
    """Deletes these blocks, in as many transactions as needed. Returns the number held."""
    num_held = 0
    while keys:
        with shard.writing() as writer:
            num_held += writer.delete_some(keys)
    return num_held


def purge(shards: Iterable[Shard], roots: Collection[PrefixKey]) -> Removed:
    """Deletes every block of these scopes, including those stored meanwhile, as far as visible."""
    wanted = frozenset(roots)
    total = Removed()
    for shard in shards:
        while (removed := remove(shard, lambda _, entry: entry.scope in wanted)).num_blocks:
            total = total.plus(removed)
        shard.sync()
    return total


def count(shards: Iterable[Shard], roots: Collection[PrefixKey]) -> int:
    """The number of blocks of these scopes, by their own headers."""
    wanted = frozenset(roots)
    return sum(e.scope in wanted for shard in shards for rows in pages(shard) for _, e in rows)
