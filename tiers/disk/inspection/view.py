"""A disk tier's contents, for the command line, with or without a running server.

`DiskView` only reads, in short transactions. It needs no lock and no torch, and keeps no payloads.
`open_view` must not be used in the server's own process, because LMDB admits one opener per
process. `DiskTier.view` gives the same over the open shards.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tiers.blocks.keys import TOKEN_BYTES, PrefixKey
from tiers.blocks.part import Part
from tiers.blocks.tree import Tree, TreeQuery, grow
from tiers.blocks.view import BlockView
from tiers.disk.directory import (
    Meta,
    is_locked,
    read_holder,
)
from tiers.disk.format.record import Header, is_window, part_of, unpack_header, window_key
from tiers.disk.format.rows import Account, IndexEntry
from tiers.disk.inspection.maintenance import pages, pages_by_age
from tiers.disk.inspection.opening import open_shards
from tiers.disk.shard import Shard
from tiers.errors import MissReason
from tiers.tier import TierName

_NO_KEY = PrefixKey(b"")


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block's record. `why` is set if its header is unreadable."""

    key: PrefixKey
    shard: int
    sequence: int
    stored_bytes: int
    used_s: int
    scope: PrefixKey = _NO_KEY
    parent: PrefixKey = _NO_KEY
    num_tokens: int = 0
    logical_bytes: int = 0
    codec: int = 0
    layout: bytes = b""
    written_s: int = 0
    computed_s: int = 0  # when its KV was computed, before it was written
    checksum: int = 0  # xxh3_64 of the payload
    tokens: bytes = b""
    why: MissReason | None = None

    def view(self, unix_s: float) -> BlockView:
        """The block as operators see it. Records do not count hits."""
        return BlockView(
            key=self.key,
            parent=self.parent,
            scope=self.scope,
            place=TierName.DISK,
            tiers=(TierName.DISK,),
            tokens=self.tokens,
            hits=0,
            idle_s=max(0.0, unix_s - self.used_s),
            age_s=max(0.0, unix_s - self.computed_s),
        )


@dataclass(frozen=True, slots=True)
class DiskSummary:
    """The whole tier in numbers."""

    path: Path
    format: int
    num_shards: int
    capacity_bytes: int  # that the files may take at present
    setting_bytes: int  # that they may take where their file system allows it
    file_bytes: int
    num_blocks: int
    stored_bytes: int
    logical_bytes: int
    num_stored: int
    num_evicted: int
    written_bytes: int
    num_scopes: int
    clean: bool
    server: str | None  # the server that holds the folder

    @property
    def ratio(self) -> float:
        """Logical bytes per stored byte."""
        return self.logical_bytes / self.stored_bytes if self.stored_bytes else 0.0


class DiskView:
    """Read-only, over open shards. Raises what storage raises."""

    def __init__(self, path: Path, meta: Meta, shards: Sequence[Shard]) -> None:
        self.path = path
        self.meta = meta
        self.shards = shards

    def summary(self) -> DiskSummary:
        totals = [shard.read_totals() for shard in self.shards]
        return DiskSummary(
            path=self.path,
            format=self.meta.format,
            num_shards=len(self.shards),
            capacity_bytes=sum(shard.limit_bytes for shard in self.shards),
            setting_bytes=self.meta.setting_bytes,
            file_bytes=sum(shard.file_bytes() for shard in self.shards),
            num_blocks=sum(total.num_blocks for total in totals),
            stored_bytes=sum(total.stored_bytes for total in totals),
            logical_bytes=sum(total.logical_bytes for total in totals),
            num_stored=sum(total.num_stored for total in totals),
            num_evicted=sum(total.num_evicted for total in totals),
            written_bytes=sum(total.written_bytes for total in totals),
            num_scopes=len(self.accounts()),
            clean=self.meta.clean,
            server=read_holder(self.path) if is_locked(self.path) else None,
        )

    def blocks(self, *, oldest: bool = False) -> Iterator[BlockInfo]:
        """Every block, by key or (`oldest`) in order of eviction."""
        for number, shard in enumerate(self.shards):
            for rows in pages_by_age(shard) if oldest else pages(shard):
                for key, entry in rows:
                    if not is_window(key):
                        yield self._info(number, key, entry)

    def find(self, key_start: bytes) -> list[BlockInfo]:
        """Blocks whose key begins with these bytes."""
        found = []
        for number, shard in enumerate(self.shards):
            after: PrefixKey | None = None
            start = PrefixKey(key_start)
            exact = shard.find([start]) if len(start) == 16 else []
            if exact:
                found.append(self._info(number, start, exact[0]))
                continue
            after = start
            while rows := shard.entries(after, 64):
                mine = [(key, entry) for key, entry in rows if key.startswith(key_start)]
                blocks = [row for row in mine if not is_window(row[0])]
                found += [self._info(number, *row) for row in blocks]
                if len(mine) < len(rows):
                    break
                after = rows[-1][0]
        return found

    def _info(self, number: int, key: PrefixKey, entry: IndexEntry) -> BlockInfo:
        """A block, with the bytes of its window part where that has a record of its own."""
        info = _info(number, key, entry)
        if part_of(entry.header) is not Part.LASTING:
            return info
        windows = self.shards[number].find([window_key(key)])
        return replace(
            info,
            stored_bytes=info.stored_bytes + sum(each.place.nbytes for each in windows),
            logical_bytes=info.logical_bytes + sum(each.logical_nbytes for each in windows),
        )

    def chain(self, block: BlockInfo) -> list[BlockInfo]:
        """The blocks that lead to `block`, the first of the prompt first, and `block` itself."""
        trail = [block]
        while trail[-1].parent != trail[-1].scope:
            before = self.find(trail[-1].parent) if trail[-1].parent else []
            if not before:
                break
            trail.append(before[0])
        return trail[::-1]

    def children(self) -> Mapping[PrefixKey, list[BlockInfo]]:
        """Blocks by parent. Children of a scope's root begin prompts."""
        children: dict[PrefixKey, list[BlockInfo]] = {}
        for block in self.blocks():
            children.setdefault(block.parent, []).append(block)
        return children

    def tree(self, query: TreeQuery, now_s: float) -> Tree:
        """The tree of the tier. Reads all of its blocks, and shows as many as the query allows."""
        children = self.children()
        return grow(_DiskForest(children, now_s), query, sum(map(len, children.values())))

    def accounts(self) -> dict[PrefixKey, Account]:
        total: dict[PrefixKey, Account] = {}
        for shard in self.shards:
            for root, account in shard.accounts().items():
                total[root] = total.get(root, Account()).plus(*account)
        return total


class _DiskForest:
    """Records as a forest for `tiers.blocks.tree`, ordered by last use."""

    def __init__(self, children: Mapping[PrefixKey, list[BlockInfo]], now_s: float) -> None:
        self._children = children
        self._now_s = now_s

    def scopes(self) -> list[PrefixKey]:
        return sorted(root for root, found in self._children.items() if found[0].scope == root)

    def following(self, key: PrefixKey) -> Sequence[BlockInfo]:
        return self._children.get(key, ())

    def rank(self, block: BlockInfo) -> int:
        return block.used_s

    def look(self, block: BlockInfo) -> BlockView:
        return block.view(self._now_s)


@contextmanager
def open_view(path: Path) -> Iterator[DiskView]:
    """A view of a disk tier's folder, from any process except its server's."""
    with open_shards(path, readonly=True) as (meta, shards):
        yield DiskView(path, meta, shards)


def _info(number: int, key: PrefixKey, entry: IndexEntry) -> BlockInfo:
    place = entry.place
    header = unpack_header(entry.header)
    if not isinstance(header, Header):
        return BlockInfo(key, number, place.sequence, place.nbytes, place.used_s, why=header)
    return BlockInfo(
        key=key,
        shard=number,
        sequence=place.sequence,
        stored_bytes=place.nbytes,
        used_s=place.used_s,
        scope=header.scope,
        parent=header.parent,
        num_tokens=len(header.tokens) // TOKEN_BYTES,
        logical_bytes=header.logical_nbytes,
        codec=header.codec,
        layout=header.layout,
        written_s=header.written_s,
        computed_s=header.computed_s,
        checksum=header.payload_checksum,
        tokens=header.tokens,
    )
