"""Reads LMDB's file without LMDB, and checks every page as untrusted bytes.

LMDB trusts its pages, so a damaged one ends the process with an abort or a signal. This reader
checks every number against its bounds before it follows it, so damage only raises `Torn`. It serves
lookups in an unchecked shard and the checks of `tiers.disk.recovery`.

Format: LMDB 0.9, data version 1, little-endian, pages of 4 KiB; `struct MDB_page`, `MDB_node`,
`MDB_db` and `MDB_meta` of mdb.c. Any thread, each call on its own.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tiers.disk.recovery.page import (
    BIG,
    BRANCH,
    HEADER,
    LEAF,
    META,
    NODE,
    NODE_HEAD,
    PAGE,
    PAGE_HEAD,
    SUB,
    Torn,
    check_nodes,
    child_at,
    flags_of,
    num_nodes,
    pointer,
    run_pages,
    search,
)

if TYPE_CHECKING:
    import numpy as np

MAGIC = 0xBEEFC0DE
DATA_VERSION = 1
MAX_DEPTH = 32  # CURSOR_STACK
NO_PAGE = 0xFFFFFFFFFFFFFFFF
INTEGER_KEYS = 0x08
_MAX_SEEN = 1024  # pages remembered by `find`: 4 MiB
_TREE = struct.Struct("<IHHQQQQQ")
_META_HEAD = struct.Struct("<IIQQ")
_LAST = struct.Struct("<QQ")


class LmdbTree(NamedTuple):
    """`MDB_db`: one B+ tree of the file."""

    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    num_entries: int
    root: int


class Head(NamedTuple):
    """`MDB_meta`: one of the two states at the beginning of the file."""

    slot: int
    transaction: int
    last_page: int
    free: LmdbTree
    main: LmdbTree


class Node(NamedTuple):
    """An entry of a leaf. `run` is the first page of a value with its own pages, or 0."""

    key: bytes
    value: bytes
    run: int
    nbytes: int
    is_tree: bool


@dataclass(slots=True)
class Walked:
    """The pages visited by a walk. Runs are (first page, number of pages)."""

    branch: list[int] = field(default_factory=list)
    leaf: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)


class PageFile:
    """An open `data.mdb`. Pages at or beyond `num_pages` are never read."""

    def __init__(self, fd: int, map_bytes: int) -> None:
        self._fd = fd
        self.num_pages = min(os.fstat(fd).st_size, map_bytes) // PAGE
        self._map_pages = map_bytes // PAGE
        self._seen: dict[int, bytes] = {}

    def heads(self) -> list[Head]:
        """The valid states, newest first; empty if neither can be read."""
        found = [head for head in map(self.head, (0, 1)) if head is not None]
        return sorted(found, key=lambda head: head.transaction, reverse=True)

    def head(self, slot: int) -> Head | None:
        """The state in this slot, if it is valid."""
        page = os.pread(self._fd, PAGE, slot * PAGE)
        if len(page) < PAGE:
            return None
        number, _, flags, _, _ = PAGE_HEAD.unpack_from(page)
        magic, version, address, _ = _META_HEAD.unpack_from(page, HEADER)
        at = HEADER + _META_HEAD.size
        free = LmdbTree(*_TREE.unpack_from(page, at))
        main = LmdbTree(*_TREE.unpack_from(page, at + _TREE.size))
        last_page, transaction = _LAST.unpack_from(page, at + 2 * _TREE.size)
        right = (
            (number, flags, magic, version, address) == (slot, META, MAGIC, DATA_VERSION, 0)
            and (free.pad, free.flags, main.flags) == (PAGE, INTEGER_KEYS, 0)
            and 1 <= last_page < self._map_pages
            and transaction < 1 << 62
        )
        return Head(slot, transaction, last_page, free, main) if right else None

    def trees(self, head: Head) -> dict[str, LmdbTree]:
        """The named trees. Raises Torn."""
        found: dict[str, LmdbTree] = {}
        for node in self.nodes(head.main):
            if not node.is_tree or node.nbytes != _TREE.size:
                raise Torn(f"{node.key!r} is not a tree")
            tree = LmdbTree(*_TREE.unpack(node.value))
            if tree.flags or tree.pad:
                raise Torn(f"the tree {node.key!r} has flags {tree.flags:#x}")
            found[node.key.decode(errors="replace")] = tree
        return found

    def find(self, tree: LmdbTree, key: bytes) -> Node | None:
        """The entry of a key. Raises Torn. Checks only what it reads of a page."""
        number = tree.root
        if number == NO_PAGE:
            return None
        try:
            for _ in range(MAX_DEPTH):
                page = self._recent(number)
                if flags_of(page) == BRANCH:
                    number = child_at(page, search(page, key))
                    continue
                node = self.node_at(page, search(page, key))
                return node if node is not None and node.key == key else None
        except (struct.error, IndexError) as error:
            raise Torn(f"page {number} has a node outside of it") from error
        raise Torn("the tree is deeper than any")

    def rows(self, tree: LmdbTree, start: bytes = b"", *, back: bool = False) -> Iterator[Node]:
        """Entries in order from `start`, or `back` from it to the first. Raises Torn."""
        if tree.root != NO_PAGE:
            yield from self._rows(tree, tree.root, min(tree.depth, MAX_DEPTH), start, back)

    def _rows(
        self, tree: LmdbTree, number: int, depth: int, start: bytes, back: bool
    ) -> Iterator[Node]:
        page = self.page(number)
        if (flags_of(page) == LEAF) != (depth == 1):
            raise Torn(f"page {number} is a leaf or a branch at the wrong depth")
        if depth == 1:
            nodes = [
                n for n in self._leaf(page, number) if (n.key <= start if back else n.key >= start)
            ]
            yield from reversed(nodes) if back else nodes
            return
        children = self._branch(page, number, tree)
        first = next(
            (at for at, (key, _) in enumerate(children) if at and key > start), len(children)
        )
        near = children[:first][::-1] if back else children[first - 1 :]
        for _, child in near:
            yield from self._rows(tree, child, depth - 1, start, back)

    def nodes(self, tree: LmdbTree, walked: Walked | None = None) -> Iterator[Node]:
        """Every entry of a tree in order, checked as far as LMDB relies on it. Raises Torn. Visited
        pages are recorded in `walked`. The caller checks that no page is used twice."""
        walked = walked if walked is not None else Walked()
        numbers = (len(walked.branch), len(walked.leaf), len(walked.runs))
        num_entries = 0
        last: bytes | None = None
        for node in self._walk(tree, walked):
            order = _order(node.key, tree)
            if last is not None and order <= last:
                raise Torn("keys are out of order")
            last = order
            num_entries += 1
            yield node
        run_total = sum(count for _, count in walked.runs[numbers[2] :])
        seen = (len(walked.branch) - numbers[0], len(walked.leaf) - numbers[1], run_total)
        if (*seen, num_entries) != tree[3:7]:
            raise Torn(f"a tree of {tree[3:7]} pages and entries has {(*seen, num_entries)}")

    def value(self, node: Node) -> bytes:
        """A value, in its leaf or in its own pages. Raises Torn."""
        if not node.run:
            return node.value
        data = os.pread(self._fd, node.nbytes, node.run * PAGE + HEADER)
        if len(data) < node.nbytes:
            raise Torn(f"the run at page {node.run} is cut short")
        return data

    def free_pages(self, node: Node, last_page: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
        """A list of free pages, the highest first. Raises Torn."""
        import numpy as np  # here, since a command that only counts blocks needs none

        numbers = np.frombuffer(self.value(node), "<u8")
        if len(numbers) == 0 or len(numbers) - 1 < numbers[0]:
            raise Torn("a list of free pages is longer than its room")
        pages = numbers[1 : 1 + int(numbers[0])]
        if len(pages) and not (pages[:-1] > pages[1:]).all():
            raise Torn("a list of free pages is out of order")
        if len(pages) and not 2 <= int(pages[-1]) <= int(pages[0]) <= last_page:
            raise Torn("a page is free that the file does not have")
        return pages

    def will_need(self, numbers: list[int]) -> None:
        for number in numbers:
            os.posix_fadvise(self._fd, number * PAGE, PAGE, os.POSIX_FADV_WILLNEED)

    def _walk(self, tree: LmdbTree, walked: Walked) -> Iterator[Node]:
        if tree.root == NO_PAGE:
            if tree.depth:
                raise Torn("a tree without a root has a depth")
            return
        stack: list[tuple[int, int, bytes, bytes | None]] = [(tree.root, 1, b"", None)]
        while stack:
            number, depth, low, high = stack.pop()
            page = self.page(number)
            if flags_of(page) == BRANCH:
                if depth >= min(tree.depth, MAX_DEPTH):
                    raise Torn(f"page {number} is a branch at the depth of leaves")
                walked.branch.append(number)
                children = self._branch(page, number, tree)
                starts = [low, *(start for start, _ in children[1:])]
                ends = [*starts[1:], high]
                rows = [
                    (child, depth + 1, start, end)
                    for (_, child), start, end in zip(children, starts, ends, strict=True)
                ]
                self.will_need([row[0] for row in rows if row[0] < self.num_pages])
                stack += reversed(rows)
                if len(stack) > self.num_pages:
                    raise Torn("the tree has more pages than the file")
                continue
            if depth != tree.depth:
                raise Torn(f"page {number} is a leaf at depth {depth} of {tree.depth}")
            walked.leaf.append(number)
            if len(walked.leaf) > self.num_pages:
                raise Torn("the tree has more pages than the file")
            nodes = self._leaf(page, number)
            first, last = (_order(nodes[at].key, tree) for at in (0, -1))
            if first < _order(low, tree) or (high is not None and last >= _order(high, tree)):
                raise Torn(f"page {number} has keys that belong elsewhere")
            for node in nodes:
                if node.run:
                    walked.runs.append((node.run, run_pages(node.nbytes)))
                yield node

    def page(self, number: int) -> bytes:
        """A page that has this number. Raises Torn."""
        if not 2 <= number < self.num_pages:
            raise Torn(f"page {number} is none of the file's {self.num_pages}")
        page = os.pread(self._fd, PAGE, number * PAGE)
        if len(page) < PAGE or PAGE_HEAD.unpack_from(page)[0] != number:
            raise Torn(f"page {number} is another page, or cut short")
        return page

    def node_at(self, leaf: bytes, place: int) -> Node | None:
        """The leaf's node at this place; None before the first. Raises Torn."""
        number = PAGE_HEAD.unpack_from(leaf)[0]
        try:
            return self._node(leaf, number, pointer(leaf, place)) if place >= 0 else None
        except struct.error as error:
            raise Torn(f"page {number} has a node outside of it") from error

    def _recent(self, number: int) -> bytes:
        """The page, as it was when it was last asked for: neighbouring keys share theirs."""
        found = self._seen.get(number)
        if found is None:
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            found = self._seen[number] = self.page(number)
        return found

    def _branch(self, page: bytes, number: int, tree: LmdbTree) -> list[tuple[bytes, int]]:
        """(first key, page) of each child. The first child's key is meaningless."""
        check_nodes(page, number)
        children: list[tuple[bytes, int]] = []
        for place in range(num_nodes(page)):
            at = pointer(page, place)
            nbytes = NODE_HEAD.unpack_from(page, at)[3]
            children.append((page[at + NODE : at + NODE + nbytes], child_at(page, place)))
        order = [_order(key, tree) for key, _ in children[1:]]
        if not order or any(a >= b for a, b in pairwise(order)):
            raise Torn(f"the children of page {number} are out of order")
        return children

    def _leaf(self, page: bytes, number: int) -> list[Node]:
        check_nodes(page, number)
        places = range(num_nodes(page))
        return [self._node(page, number, pointer(page, place)) for place in places]

    def _node(self, page: bytes, number: int, at: int) -> Node:
        """The leaf's node at this offset."""
        low, high, flags, key_nbytes = NODE_HEAD.unpack_from(page, at)
        nbytes = low | high << 16
        start = at + NODE + key_nbytes
        run, value = 0, b""
        if flags == BIG:
            if start + 8 > PAGE:
                raise Torn(f"a node of page {number} leaves it")
            run = int.from_bytes(page[start : start + 8], "little")
            if not 2 <= run <= self.num_pages - run_pages(nbytes):
                raise Torn(f"page {number} names a run at page {run}")
        elif flags in (0, SUB):
            value = page[start : start + nbytes]
        else:
            raise Torn(f"a node of page {number} has flags {flags:#x}")
        return Node(page[at + NODE : start], value, run, nbytes, flags == SUB)


def free_spans(path: Path, map_bytes: int, before: int, keep: int) -> list[tuple[int, int]]:
    """Parts (offset, bytes) of the file that are free since a transaction earlier than `before`,
    without the `keep` pages that LMDB takes first. The file must not change meanwhile. Raises
    Torn."""
    import numpy as np  # here, since a command that only counts blocks needs none

    found = [np.empty(0, "<u8")]
    with path.open("rb") as opened:
        file = PageFile(opened.fileno(), map_bytes)
        for head in file.heads()[:1]:
            for node in file.nodes(head.free):
                if int.from_bytes(node.key, "little") >= before:
                    break
                pages = file.free_pages(node, head.last_page)[::-1]
                found.append(pages[keep:])
                keep = max(0, keep - len(pages))
    pages = np.sort(np.concatenate(found))
    runs = np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1)
    return [(int(run[0]) * PAGE, len(run) * PAGE) for run in runs if len(run)]


def _order(key: bytes, tree: LmdbTree) -> bytes:
    """The sort key of a key. Integers are little-endian."""
    return key[::-1] if tree.flags & INTEGER_KEYS else key
