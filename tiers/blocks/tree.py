"""Blocks as a tree of prefixes, in which a chain without a branch is one node.

`tiers.explore` grows it from all tiers, on the engine thread between two steps. `cachesvc cache
tree` draws it, and the admin pages show it. The number of visited blocks is bounded, so that a
large cache does not delay the step loop. A block takes 1 to 2 microseconds (100,000 in the index,
one core of a virtual machine), so the default takes at most 10 ms.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import chain, groupby, islice
from typing import Any, Protocol, TypeVar

from tiers.blocks.keys import TOKEN_BYTES, PrefixKey
from tiers.blocks.view import BlockView
from tiers.errors import ConfigurationError

MAX_DEPTH = 64
B = TypeVar("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeQuery:
    """What to show, within bounds. `roots` are scopes' roots or keys of blocks to begin at; empty
    means every scope. Raises ConfigurationError for bounds that show nothing."""

    roots: tuple[PrefixKey, ...] = ()
    depth: int = 8  # levels of nodes below each root
    max_nodes: int = 500
    max_children: int = 50  # of one node; those with the highest rank are shown
    max_blocks: int = 5_000  # visited in total
    num_tokens: int = 0  # leading token ids returned for each node

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= MAX_DEPTH:
            raise ConfigurationError(f"depth is {self.depth}; use 1 to {MAX_DEPTH}")
        for name in ("max_nodes", "max_children", "max_blocks"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; use 1 or more")
        if self.num_tokens < 0:
            raise ConfigurationError(f"num_tokens is {self.num_tokens}; use 0 or more")


@dataclass(slots=True)
class TreeNode:
    """A run of blocks without a branch. Immutable once the tree is built. A root represents a scope
    or the requested prefix, and has no blocks of its own."""

    key: PrefixKey | None  # of the first block; None if it is partly filled
    last: PrefixKey | None  # of the last
    num_blocks: int = 0
    num_tokens: int = 0
    places: list[str] = field(default_factory=list)  # one for each block, in order
    tiers: list[tuple[str, ...]] = field(default_factory=list)  # likewise: all that hold it
    num_in_use: int = 0
    num_clean: int = 0
    hits: int = 0  # of its block with the most hits
    hit_tokens: int = 0  # over all its blocks: tokens times hits
    age_s: float = 0.0  # of its oldest block
    idle_s: float = 0.0  # since its last use
    tokens: bytearray = field(default_factory=bytearray)  # the first ones, int32
    children: list["TreeNode"] = field(default_factory=list)
    left_off: int = 0  # continuations that are not shown

    @property
    def runs(self) -> list[tuple[str, int]]:
        """(place, number of consecutive blocks there), first block first."""
        return [(place, len(list(blocks))) for place, blocks in groupby(self.places)]

    @property
    def num_in(self) -> dict[str, int]:
        """The number of blocks in each tier. A block in several tiers counts in each."""
        return dict(Counter(chain.from_iterable(self.tiers)))


@dataclass(frozen=True, slots=True)
class Tree:
    """Of `num_blocks` blocks in all, `num_seen` are in nodes below the roots. If no node omits
    anything, the others are unreachable: a block before them is gone."""

    roots: list[TreeNode]
    num_blocks: int
    num_seen: int


class Forest(Protocol[B]):
    """Blocks by the prefix that they continue."""

    def scopes(self) -> Iterable[PrefixKey]:
        """The roots under which there are blocks."""

    def following(self, key: PrefixKey) -> Sequence[B]:
        """The blocks that continue the prefix `key`, those known longest first."""

    def rank(self, block: B) -> int:
        """Priority for being shown if not all blocks are; higher first."""

    def look(self, block: B) -> BlockView: ...


def grow(forest: Forest[B], query: TreeQuery, num_blocks: int) -> Tree:
    """The tree of a forest of `num_blocks`.

    It is built level by level, so that its top is there if it is cut, and the nodes of a level
    share the room that is left, so that every scope shows something.
    """
    given = query.roots or forest.scopes()
    roots = [TreeNode(key, key) for key in islice(given, query.max_nodes)]
    waiting, level = roots, 1
    num_nodes = num_seen = 0
    while waiting:
        for num_before, node in enumerate(waiting):
            if node.last is None:
                continue
            found = forest.following(node.last)
            shown: Sequence[B] = ()
            if level <= query.depth:
                share = -(-(query.max_nodes - num_nodes) // (len(waiting) - num_before))
                room = min(query.max_children, share)
                shown = _foremost(forest, found, room, query.max_blocks)
            for block in shown:
                if num_seen == query.max_blocks:
                    break
                child = _run(forest, block, query, query.max_blocks - num_seen)
                node.children.append(child)
                num_nodes += 1
                num_seen += child.num_blocks
            node.left_off = len(found) - len(node.children)
        waiting, level = [child for node in waiting for child in node.children], level + 1
    return Tree(roots, num_blocks, num_seen)


def _foremost(forest: Forest[B], found: Sequence[B], room: int, max_looked: int) -> Sequence[B]:
    """The `room` blocks of highest rank among the first `max_looked`."""
    if len(found) == 1:
        return found[:room]
    return nlargest(room, found[:max_looked], key=forest.rank)


def _run(forest: Forest[B], block: B, query: TreeQuery, room: int) -> TreeNode:
    """The node that begins with `block`: at most `room` blocks, up to the next branch."""
    view = forest.look(block)
    node = TreeNode(view.key, view.key, idle_s=view.idle_s)
    while True:
        _take(node, view, query.num_tokens)
        if view.key is None or node.num_blocks == room:
            return node
        found = forest.following(view.key)
        if len(found) != 1:
            return node
        view = forest.look(found[0])


def _take(node: TreeNode, view: BlockView, num_tokens: int) -> None:
    node.last = view.key
    node.num_blocks += 1
    node.num_tokens += len(view.tokens) // TOKEN_BYTES
    node.places.append(view.place)
    node.tiers.append(view.tiers)
    node.num_in_use += view.num_requests > 0
    node.num_clean += view.is_clean
    node.hits = max(node.hits, view.hits)
    node.hit_tokens += view.hits * (len(view.tokens) // TOKEN_BYTES)
    node.age_s = max(node.age_s, view.age_s)
    node.idle_s = min(node.idle_s, view.idle_s)
    missing = num_tokens * TOKEN_BYTES - len(node.tokens)
    if missing > 0:
        node.tokens += view.tokens[:missing]


def tree_json(tree: Tree) -> dict[str, Any]:
    """The tree as JSON: keys in hex, times in seconds, tokens as ids."""
    return {
        "num_blocks": tree.num_blocks,
        "num_seen": tree.num_seen,
        "scopes": [
            {
                "scope": root.last.hex() if root.last else None,
                "left_off": root.left_off,
                "nodes": [_node_json(node) for node in root.children],
            }
            for root in tree.roots
        ],
    }


def _node_json(node: TreeNode) -> dict[str, Any]:
    return {
        "key": node.key.hex() if node.key else None,
        "last_key": node.last.hex() if node.last else None,
        "num_blocks": node.num_blocks,
        "num_tokens": node.num_tokens,
        "runs": [{"place": str(place), "num_blocks": count} for place, count in node.runs],
        "blocks_in": {str(tier): count for tier, count in node.num_in.items()},
        "num_in_use": node.num_in_use,
        "num_clean": node.num_clean,
        "hits": node.hits,
        "hit_tokens": node.hit_tokens,
        "age_s": round(node.age_s, 3),
        "idle_s": round(node.idle_s, 3),
        "token_ids": list(array("i", node.tokens)),
        "left_off": node.left_off,
        "children": [_node_json(child) for child in node.children],
    }
