"""Maintenance of shards: evict by rule, purge scopes, give room back. Safe beside a server.

Each works in pages of PAGE_BLOCKS blocks with a short transaction per page, so that neither the
server's writes nor the reuse of freed pages waits long. Called by the command line from its own
process, and by `DiskTier` in the server.
"""

from collections.abc import Callable, Collection, Iterable, Iterator

from tiers.blocks.keys import PrefixKey
from tiers.blocks.part import Part
from tiers.disk.format.record import num_blocks_of, part_of, window_key
from tiers.disk.format.rows import IndexEntry
from tiers.disk.room import RELIEF_COMMITS
from tiers.disk.shard import Shard
from tiers.tier import Removed

PAGE_BLOCKS = 256

Rule = Callable[[PrefixKey, IndexEntry], bool]


def pages(shard: Shard) -> Iterator[list[tuple[PrefixKey, IndexEntry]]]:
    """Every record once, by key. One that is stored meanwhile may be missed."""
    after: PrefixKey | None = None
    while rows := shard.entries(after, PAGE_BLOCKS):
        yield rows
        after = rows[-1][0]


def pages_by_age(shard: Shard) -> Iterator[list[tuple[PrefixKey, IndexEntry]]]:
    """Every record, the next to be evicted first."""
    after = 0
    while rows := shard.by_age(after, PAGE_BLOCKS):
        yield rows
        after = rows[-1][1].place.sequence


def chosen(
    shard: Shard, rule: Rule, *, at_most_bytes: int | None = None
) -> Iterator[tuple[list[PrefixKey], Removed]]:
    """The records selected by `rule`, oldest first, up to `at_most_bytes`, page by page. A block
    takes its window part along."""
    along: set[PrefixKey] = set()  # window parts chosen before their turn
    total = 0
    for rows in pages_by_age(shard):
        keys: list[PrefixKey] = []
        size = Removed()
        for key, entry in rows:
            if at_most_bytes is not None and total + size.stored_bytes >= at_most_bytes:
                break
            if key in along or not rule(key, entry):
                along.discard(key)
                continue
            keys.append(key)
            size = size.plus(_size(key, entry))
            if part_of(entry.header) is Part.LASTING and window_key(key) not in keys:
                for window in shard.find([window_key(key)]):
                    keys.append(window_key(key))
                    along.add(window_key(key))
                    size = size.plus(_size(window_key(key), window))
        yield keys, size
        total += size.stored_bytes


def remove(shard: Shard, rule: Rule, *, at_most_bytes: int | None = None) -> Removed:
    """Deletes the records selected by `rule`, as `chosen` does."""
    total = Removed()
    for keys, size in chosen(shard, rule, at_most_bytes=at_most_bytes):
        delete(shard, keys)
        total = total.plus(size)
    return total


def _size(key: PrefixKey, entry: IndexEntry) -> Removed:
    return Removed(num_blocks_of(key), entry.place.nbytes, entry.logical_nbytes)


def delete(shard: Shard, keys: list[PrefixKey]) -> int:
    """Deletes these blocks, in as many transactions as needed. Returns the number held."""
    num_held = 0
    while keys:
        with shard.writing() as writer:
            num_held += writer.delete_some(keys)
    return num_held


def give_back(shards: Iterable[Shard]) -> tuple[int, int]:
    """Gives free pages back to the file system, without room of its own. Returns the bytes that
    the files took before, and take now."""
    before = after = 0
    for shard in shards:
        before += shard.file_bytes()
        for _ in range(RELIEF_COMMITS):
            with shard.writing():
                pass
        shard.give_back(max_kept=0)
        after += shard.file_bytes()
    return before, after


def purge(shards: Iterable[Shard], roots: Collection[PrefixKey]) -> Removed:
    """Deletes every block of these scopes, including those stored meanwhile, as far as visible."""
    wanted = frozenset(roots)
    total = Removed()
    for shard in shards:
        while (removed := remove(shard, lambda _, entry: entry.scope in wanted)).stored_bytes:
            total = total.plus(removed)
        shard.sync()
    return total


def count(shards: Iterable[Shard], roots: Collection[PrefixKey]) -> int:
    """The number of blocks of these scopes, by their own headers."""
    wanted = frozenset(roots)
    rows = (row for shard in shards for page in pages(shard) for row in page)
    return sum(num_blocks_of(key) for key, entry in rows if entry.scope in wanted)
