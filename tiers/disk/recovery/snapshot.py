"""Lookups in one committed state of a shard, without LMDB. A damaged page raises Torn."""

from collections.abc import Iterator, Mapping, Sequence

from tiers.blocks.keys import PrefixKey
from tiers.blocks.part import Part
from tiers.disk.format.record import part_of, window_key
from tiers.disk.format.rows import IndexEntry, Totals
from tiers.disk.recovery.pages import LmdbTree, PageFile
from tiers.disk.storage import Storage


class Snapshot:
    """The named trees of one commit. Its pages must not be reused meanwhile."""

    def __init__(self, storage: Storage, pages: PageFile, trees: Mapping[str, LmdbTree]) -> None:
        self._storage = storage
        self._pages = pages
        self._trees = trees

    def get(self, name: str, key: bytes) -> bytes | None:
        self._storage.before("get")
        tree = self._trees.get(name)
        node = self._pages.find(tree, key) if tree is not None else None
        return None if node is None else self._pages.value(node)

    def rows(
        self, name: str, start: bytes = b"", *, back: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values in order from `start`, or `back` from it to the first."""
        tree = self._trees.get(name)
        if tree is not None:
            for node in self._pages.rows(tree, start, back=back):
                yield node.key, self._pages.value(node)

    def keys(self, name: str) -> Iterator[bytes]:
        tree = self._trees.get(name)
        return (node.key for node in self._pages.rows(tree)) if tree is not None else iter(())

    def num_pages(self) -> int:
        return sum(sum(tree[3:6]) for tree in self._trees.values())

    def read_totals(self) -> Totals:
        return Totals.unpack(self.get("state", b"totals"))

    def entry(self, key: PrefixKey) -> IndexEntry | None:
        data = self.get("index", key)
        return None if data is None else IndexEntry.unpack(data)

    def find(self, keys: Sequence[PrefixKey]) -> list[IndexEntry]:
        """Index entries of the leading run of keys that are held."""
        found: list[IndexEntry] = []
        for key in keys:
            entry = self.entry(key)
            if entry is None:
                break
            found.append(entry)
        return found

    def have_windows(self, keys: Sequence[PrefixKey]) -> list[bool]:
        """Whether each of these blocks is held with its window part."""
        return [self.entry(window_key(key)) is not None or self._is_whole(key) for key in keys]

    def _is_whole(self, key: PrefixKey) -> bool:
        entry = self.entry(key)
        return entry is not None and part_of(entry.header) is Part.WHOLE
