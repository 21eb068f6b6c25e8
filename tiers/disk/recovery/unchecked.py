"""A shard that is still being checked, for readers.

It does not use LMDB and trusts nothing: an inconsistent page is a block that is not found, and the
reader verifies found blocks as always. Reader threads.
"""

import struct
from collections.abc import Sequence
from pathlib import Path

from tiers.blocks.keys import PrefixKey
from tiers.blocks.part import Part
from tiers.disk.format.record import part_of, window_key
from tiers.disk.format.rows import IndexEntry, Totals
from tiers.disk.recovery.consistency import DAMAGED, proven_entry
from tiers.disk.recovery.pages import HEADER, PAGE, LmdbTree, PageFile, Torn, run_pages
from tiers.disk.storage import Storage


class UncheckedShard:
    """Lookups and reads of the newest valid state. Nobody writes the file meanwhile."""

    def __init__(self, path: Path, map_bytes: int, storage: Storage) -> None:
        self.path = path
        self.map_bytes = map_bytes
        self._storage = storage
        self._file = storage.open_file(path / "data.mdb")
        self._pages = PageFile(self._file.cached, map_bytes)
        self._trees: dict[str, LmdbTree] = {}
        for head in self._pages.heads():
            try:
                self._trees = self._pages.trees(head)
                break
            except Torn:
                continue

    def close(self) -> None:
        self._storage.close_file(self._file)

    @property
    def totals(self) -> Totals:
        """The shard's totals, as plausible as an unchecked page can be."""
        try:
            node = self._pages.find(self._trees["state"], b"totals")
            return Totals.unpack(self._pages.value(node)) if node else Totals()
        except (KeyError, Torn, struct.error):
            return Totals()

    def file_bytes(self) -> int:
        return self._storage.stat(self._file).st_blocks * 512

    def num_held(self, keys: Sequence[PrefixKey]) -> int:
        """Length of the leading run of keys found."""
        return len(self.find(keys))

    def find(self, keys: Sequence[PrefixKey]) -> list[IndexEntry]:
        """Index entries of the leading run of keys found."""
        found: list[IndexEntry] = []
        for key in keys:
            entry = self._entry(key)
            if entry is None:
                break
            found.append(entry)
        return found

    def have_windows(self, keys: Sequence[PrefixKey]) -> list[bool]:
        """Like `Shard.have_windows`."""
        return [self._entry(window_key(key)) is not None or self._is_whole(key) for key in keys]

    def _is_whole(self, key: PrefixKey) -> bool:
        entry = self._entry(key)
        return entry is not None and part_of(entry.header) is Part.WHOLE

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

    def _entry(self, key: PrefixKey) -> IndexEntry | None:
        try:
            node = self._pages.find(self._trees["index"], key)
            if node is None:
                return None
            entry, _ = proven_entry(key, self._pages.value(node))
        except (KeyError, Torn, *DAMAGED):
            return None
        first = entry.place.offset // PAGE
        inside = 2 <= first <= self._pages.num_pages - run_pages(entry.place.nbytes)
        return entry if inside else None
