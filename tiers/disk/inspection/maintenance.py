"""Maintenance of shards: purges and counts scopes, in pages. Safe beside a server.

Each works in pages of PAGE_BLOCKS blocks with a short transaction per page, so that neither the
server's writes nor the reuse of freed pages waits long. Called by the command line from its own
process, and by `DiskTier` in the server.
"""

from collections.abc import Collection, Iterable, Iterator

from tiers.blocks.keys import PrefixKey
from tiers.disk.format.record import num_blocks_of
from tiers.disk.format.rows import IndexEntry
from tiers.disk.shard import Shard
from tiers.tier import Removed

PAGE_BLOCKS = 256


def pages(shard: Shard) -> Iterator[list[tuple[PrefixKey, IndexEntry]]]:
    """Every record once, by key. One that is stored meanwhile may be missed."""
    after: PrefixKey | None = None
    while rows := shard.entries(after, PAGE_BLOCKS):
        yield rows
        after = rows[-1][0]


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
        while (removed := _remove(shard, wanted)).stored_bytes:
            total = total.plus(removed)
        shard.sync()
    return total


def _remove(shard: Shard, scopes: Collection[PrefixKey]) -> Removed:
    """Deletes what one pass over the shard finds of these scopes."""
    total = Removed()
    for rows in pages(shard):
        found = [(key, entry) for key, entry in rows if entry.scope in scopes]
        delete(shard, [key for key, _ in found])
        for key, entry in found:
            total = total.plus(
                Removed(num_blocks_of(key), entry.place.nbytes, entry.logical_nbytes)
            )
    return total


def count(shards: Iterable[Shard], roots: Collection[PrefixKey]) -> int:
    """The number of blocks of these scopes, by their own headers."""
    wanted = frozenset(roots)
    rows = (row for shard in shards for page in pages(shard) for row in page)
    return sum(num_blocks_of(key) for key, entry in rows if entry.scope in wanted)
