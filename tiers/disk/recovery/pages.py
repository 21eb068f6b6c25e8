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
from typing import NamedTuple

PAGE = 4096
HEADER = 16
BRANCH, LEAF, OVERFLOW, META = 0x01, 0x02, 0x04, 0x08
MAGIC = 0xBEEFC0DE
DATA_VERSION = 1
MAX_DEPTH = 32  # CURSOR_STACK
NO_PAGE = 0xFFFFFFFFFFFFFFFF
INTEGER_KEYS = 0x08
_BIG, _SUB = 0x01, 0x02  # node flags: the value is a run of pages; the value is a tree
_NODE = 8
_PAGE_HEAD = struct.Struct("<QHHHH")  # number, pad, flags, lower, upper
_RUN_HEAD = struct.Struct("<QHHI")  # number, pad, flags, pages
_NODE_HEAD = struct.Struct("<HHHH")  # low and high half of the size, flags, length of the key
_TREE = struct.Struct("<IHHQQQQQ")
_META_HEAD = struct.Struct("<IIQQ")
_LAST = struct.Struct("<QQ")


class Torn(Exception):
    """A page was not written by LMDB."""


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


def run_pages(nbytes: int) -> int:
    """The number of pages for a value of this length."""
    return -(-(nbytes + HEADER) // PAGE)


def run_head(first: int, nbytes: int) -> bytes:
    """The HEADER bytes before a value in its run."""
    return _RUN_HEAD.pack(first, 0, OVERFLOW, run_pages(nbytes))


def is_run_head(head: bytes, first: int, nbytes: int) -> bool:
    """Whether these bytes before a value are what LMDB needs to free the run."""
    if len(head) < HEADER:
        return False
    number, _, flags, pages = _RUN_HEAD.unpack(head)
    return (number, flags, pages) == (first, OVERFLOW, run_pages(nbytes))


class PageFile:
    """An open `data.mdb`. Pages at or beyond `num_pages` are never read."""

    def __init__(self, fd: int, map_bytes: int) -> None:
        self._fd = fd
        self.num_pages = min(os.fstat(fd).st_size, map_bytes) // PAGE
        self._map_pages = map_bytes // PAGE

    def heads(self) -> list[Head]:
        """The valid states, newest first; empty if neither can be read."""
        found = []
        for slot in (0, 1):
            head = self._head(slot, os.pread(self._fd, PAGE, slot * PAGE))
            if head is not None:
                found.append(head)
        return sorted(found, key=lambda head: head.transaction, reverse=True)

    def _head(self, slot: int, page: bytes) -> Head | None:
        if len(page) < PAGE:
            return None
        number, _, flags, _, _ = _PAGE_HEAD.unpack_from(page)
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
        """The entry of a key. Raises Torn."""
        number = tree.root
        for _ in range(MAX_DEPTH):
            if number == NO_PAGE:
                return None
            page = self._page(number)
            if _kind(page) == LEAF:
                return next((node for node in self._leaf(page, number) if node.key == key), None)
            first, *others = self._branch(page, number, tree)
            number = next((child for start, child in reversed(others) if start <= key), first[1])
        raise Torn("the tree is deeper than any")

    def nodes(self, tree: LmdbTree, walked: Walked | None = None) -> Iterator[Node]:
        """Every entry of a tree in order, checked as far as LMDB relies on it. Raises Torn.

        Visited pages are recorded in `walked`. The caller checks that no page is used twice.
        """
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

    def will_need(self, numbers: list[int]) -> None:
        """Start reading these pages."""
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
            page = self._page(number)
            if _kind(page) == BRANCH:
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

    def _page(self, number: int) -> bytes:
        if not 2 <= number < self.num_pages:
            raise Torn(f"page {number} is none of the file's {self.num_pages}")
        page = os.pread(self._fd, PAGE, number * PAGE)
        if len(page) < PAGE or _PAGE_HEAD.unpack_from(page)[0] != number:
            raise Torn(f"page {number} is another page, or cut short")
        return page

    def _branch(self, page: bytes, number: int, tree: LmdbTree) -> list[tuple[bytes, int]]:
        """(first key, page) of each child. The first child's key is meaningless."""
        children: list[tuple[bytes, int]] = []
        spans: list[tuple[int, int]] = []
        for at in _pointers(page, number):
            low, middle, high, key_nbytes = _NODE_HEAD.unpack_from(page, at)
            spans.append((at, _NODE + key_nbytes))
            key = page[at + _NODE : at + _NODE + key_nbytes]
            children.append((key, low | middle << 16 | high << 32))
        _check_spans(page, number, spans)
        order = [_order(key, tree) for key, _ in children[1:]]
        if not order or any(a >= b for a, b in pairwise(order)):
            raise Torn(f"the children of page {number} are out of order")
        return children

    def _leaf(self, page: bytes, number: int) -> list[Node]:
        nodes: list[Node] = []
        spans: list[tuple[int, int]] = []
        for at in _pointers(page, number):
            low, high, flags, key_nbytes = _NODE_HEAD.unpack_from(page, at)
            nbytes = low | high << 16
            start = at + _NODE + key_nbytes
            run = 0
            if flags == _BIG:
                spans.append((at, _NODE + key_nbytes + 8))
                if start + 8 > PAGE:
                    raise Torn(f"a node of page {number} leaves it")
                run = int.from_bytes(page[start : start + 8], "little")
                if not 2 <= run <= self.num_pages - run_pages(nbytes):
                    raise Torn(f"page {number} names a run at page {run}")
                value = b""
            elif flags in (0, _SUB):
                spans.append((at, _NODE + key_nbytes + nbytes))
                value = page[start : start + nbytes]
            else:
                raise Torn(f"a node of page {number} has flags {flags:#x}")
            key = page[at + _NODE : start]
            nodes.append(Node(key, value, run, nbytes, flags == _SUB))
        _check_spans(page, number, spans)
        if not nodes:
            raise Torn(f"page {number} is an empty leaf")
        return nodes


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
                numbers = np.frombuffer(file.value(node), "<u8")  # their count, the highest first
                pages = numbers[1 : 1 + int(numbers[0])][::-1]
                found.append(pages[keep:])
                keep = max(0, keep - len(pages))
    pages = np.sort(np.concatenate(found))
    runs = np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1)
    return [(int(run[0]) * PAGE, len(run) * PAGE) for run in runs if len(run)]


def _order(key: bytes, tree: LmdbTree) -> bytes:
    """The sort key of a key. Integers are little-endian."""
    return key[::-1] if tree.flags & INTEGER_KEYS else key


def _kind(page: bytes) -> int:
    flags = int.from_bytes(page[10:12], "little")
    if flags not in (BRANCH, LEAF):
        raise Torn(f"a page has flags {flags:#x} where a branch or a leaf belongs")
    return flags


def _pointers(page: bytes, number: int) -> tuple[int, ...]:
    _, _, _, lower, upper = _PAGE_HEAD.unpack_from(page)
    if not HEADER <= lower <= upper <= PAGE or lower % 2:
        raise Torn(f"page {number} has its room from {lower} to {upper}")
    found: tuple[int, ...] = struct.unpack_from(f"<{(lower - HEADER) // 2}H", page, HEADER)
    if any(at < upper or at > PAGE - _NODE or at % 2 for at in found):
        raise Torn(f"page {number} has a node outside of its part")
    return found


def _check_spans(page: bytes, number: int, spans: list[tuple[int, int]]) -> None:
    """Checks that nodes are contiguous, from the end of the free space to the end of the page."""
    at = _PAGE_HEAD.unpack_from(page)[4]
    for start, nbytes in sorted(spans):
        if start != at:
            raise Torn(f"the nodes of page {number} do not lie side by side")
        at = start + nbytes + nbytes % 2
    if at != PAGE:
        raise Torn(f"the nodes of page {number} end at {at}")
