"""A shard that is still being checked, for readers.

It does not use LMDB and trusts nothing: an inconsistent page is a block that is not found, and the
reader verifies found blocks as always. Reader threads.
"""

import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tiers.blocks.keys import PrefixKey
from tiers.disk.format.rows import IndexEntry, Totals
from tiers.disk.recovery.consistency import DAMAGED, proven_entry
from tiers.disk.recovery.page import HEADER, PAGE, Torn, run_pages
from tiers.disk.recovery.pages import LmdbTree, PageFile
from tiers.disk.recovery.snapshot import Snapshot
from tiers.disk.storage import Storage


class UncheckedShard(Snapshot):
    """Lookups and reads of the newest valid state. Nobody writes the file meanwhile."""

    def __init__(self, path: Path, map_bytes: int, storage: Storage) -> None:
        self.path = path
        self.map_bytes = map_bytes
        self._file = storage.open_file(path / "data.mdb")
        pages = PageFile(self._file.cached, map_bytes)
        super().__init__(storage, pages, _trees(pages))

    def close(self) -> None:
        self._storage.close_file(self._file)

    @property
    def totals(self) -> Totals:
        """The shard's totals, as plausible as an unchecked page can be."""
        try:
            return self.read_totals()
        except (Torn, struct.error):
            return Totals()

    def file_bytes(self) -> int:
        return self._storage.stat(self._file).st_blocks * 512

    def will_need(self, entries: Sequence[IndexEntry]) -> None:
        for place in (entry.place for entry in entries):
            self._storage.will_need(self._file, place.offset - HEADER, place.nbytes + HEADER)

    def room_for(self, entry: IndexEntry) -> int:
        return run_pages(entry.place.nbytes) * PAGE

    def read(self, key: PrefixKey, entry: IndexEntry, into: memoryview) -> memoryview:
        """Like `Shard.read`."""
        nbytes, offset = entry.place.nbytes, entry.place.offset
        count = self._storage.read(self._file, into[: self.room_for(entry)], offset - HEADER)
        return into[HEADER : max(HEADER, min(count, HEADER + nbytes))]

    def entry(self, key: PrefixKey) -> IndexEntry | None:
        try:
            data = self.get("index", key)
            if data is None:
                return None
            entry, _ = proven_entry(key, data)
        except (Torn, *DAMAGED):
            return None
        first = entry.place.offset // PAGE
        inside = 2 <= first <= self._pages.num_pages - run_pages(entry.place.nbytes)
        return entry if inside else None


def _trees(pages: PageFile) -> dict[str, LmdbTree]:
    """Those of the newest state that can be read."""
    for head in pages.heads():
        with suppress(Torn):
            return pages.trees(head)
    return {}
