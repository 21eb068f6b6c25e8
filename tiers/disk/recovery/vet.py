"""Checks the pages that a write transaction may touch, before LMDB touches them.

LMDB ends the process on some damage. Pages that the transaction has changed are in its memory.
All others it reaches belong to the last commit: those on the way to a key and, where it
deletes or iterates, their neighbours. One thread, for one transaction.
"""

from itertools import islice

from tiers.disk.recovery.page import (
    BRANCH,
    Torn,
    check_nodes,
    child_at,
    flags_of,
    num_nodes,
    search,
)
from tiers.disk.recovery.pages import MAX_DEPTH, NO_PAGE, Head, LmdbTree, Node, PageFile

FREE_LISTS = 32  # of the oldest, from which LMDB takes pages: two or three for a batch


class PageVet:
    """Raises Torn for a damaged page. No page is checked twice."""

    def __init__(self, pages: PageFile, head: Head) -> None:
        self._pages = pages
        self._sound: dict[int, bytes] = {}
        self._ways: dict[tuple[str, bytes, bool], bytes] = {}
        self._trees = pages.trees(head)
        self._free_lists(head)

    def way(self, name: str, key: bytes, *, beside: bool = False) -> bytes | None:
        """Checks the pages on the way to `key`, and with `beside` their neighbours. Returns the
        leaf; None if the tree was empty."""
        tree = self._trees[name]
        if tree.root == NO_PAGE:
            return None
        leaf = self._ways.get((name, key, beside))
        if leaf is None:
            leaf = self._ways[name, key, beside] = self._way(tree, key, beside=beside)
        return leaf

    def node(self, leaf: bytes, key: bytes) -> Node | None:
        """The node of `key` in a leaf that `way` returned."""
        node = self._pages.node_at(leaf, search(leaf, key))
        return node if node is not None and node.key == key else None

    def last_key(self, leaf: bytes) -> bytes:
        node = self._pages.node_at(leaf, num_nodes(leaf) - 1)
        return node.key if node is not None else b""

    def _way(self, tree: LmdbTree, key: bytes, *, beside: bool) -> bytes:
        number = tree.root
        for _ in range(min(tree.depth, MAX_DEPTH) - 1):
            page = self._checked(number, branch=True)
            at = search(page, key)
            if beside:
                for near in {0, at - 1, at + 1} - {at}:
                    if 0 <= near < num_nodes(page):
                        self._edge(child_at(page, near))
            number = child_at(page, at)
        return self._checked(number, branch=False)

    def _edge(self, number: int) -> None:
        """Checks the way to the first leaf below a page."""
        for _ in range(MAX_DEPTH):
            page = self._checked(number)
            if flags_of(page) != BRANCH:
                return
            number = child_at(page, 0)

    def _checked(self, number: int, branch: bool | None = None) -> bytes:
        page = self._sound.get(number)
        if page is None:
            page = self._sound[number] = self._pages.page(number)
            check_nodes(page, number)
        if branch is not None and branch != (flags_of(page) == BRANCH):
            raise Torn(f"page {number} is a leaf or a branch at the wrong depth")
        return page

    def _free_lists(self, head: Head) -> None:
        """Checks the lists from which LMDB takes pages, and where it adds one."""
        if head.free.root == NO_PAGE:
            return
        for node in islice(self._pages.rows(head.free), FREE_LISTS):
            self._pages.free_pages(node, head.last_page)
        number = head.free.root
        while True:
            page = self._checked(number)
            if flags_of(page) != BRANCH:
                return
            for near in (0, num_nodes(page) - 2):
                self._edge(child_at(page, max(0, near)))
            number = child_at(page, num_nodes(page) - 1)
