"""A disk tier's contents, for the command line, with or without a running server.

`DiskView` only reads, in short transactions. It needs no lock and no torch, and keeps no payloads.
`open_view` must not be used in the server's own process, because LMDB admits one opener per
process. `DiskTier.view` gives the same over the open shards.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiers.blocks.keys import PrefixKey
from tiers.blocks.part import Part
from tiers.blocks.view import BlockView
from tiers.disk.directory import Meta, is_locked, read_holder
from tiers.disk.format.record import Header, is_window, unpack_header, window_key
from tiers.disk.format.rows import Account, IndexEntry
from tiers.disk.inspection.maintenance import pages
from tiers.disk.inspection.opening import open_shards
from tiers.disk.shard import Shard
from tiers.errors import MissReason
from tiers.tier import TierName

_NO_KEY = PrefixKey(b"")


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block's record. `why` is set if its header is unreadable."""

    key: PrefixKey
    stored_bytes: int
    used_s: int
    scope: PrefixKey = _NO_KEY
    parent: PrefixKey = _NO_KEY
    computed_s: int = 0  # when its KV was computed, before it was written
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
            server=read_holder(self.path) if is_locked(self.path) else None,
        )

    def blocks(self) -> Iterator[BlockInfo]:
        """Every block, by shard and key."""
        for shard in self.shards:
            for rows in pages(shard):
                yield from (_info(shard, *row) for row in rows if not is_window(row[0]))

    def accounts(self) -> dict[PrefixKey, Account]:
        total: dict[PrefixKey, Account] = {}
        for shard in self.shards:
            for root, account in shard.accounts().items():
                total[root] = total.get(root, Account()).plus(*account)
        return total


@contextmanager
def open_view(path: Path) -> Iterator[DiskView]:
    """A view of a disk tier's folder, from any process except its server's."""
    with open_shards(path, readonly=True) as (meta, shards):
        yield DiskView(path, meta, shards)


def _info(shard: Shard, key: PrefixKey, entry: IndexEntry) -> BlockInfo:
    """A block, with the bytes of its window part where that has a record of its own."""
    header, stored_bytes = unpack_header(entry.header), entry.place.nbytes
    if not isinstance(header, Header):
        return BlockInfo(key, stored_bytes, entry.place.used_s, why=header)
    if header.part is Part.LASTING:
        stored_bytes += sum(each.place.nbytes for each in shard.find([window_key(key)]))
    return BlockInfo(
        key=key,
        stored_bytes=stored_bytes,
        used_s=entry.place.used_s,
        scope=header.scope,
        parent=header.parent,
        computed_s=header.computed_s,
        tokens=header.tokens,
    )
