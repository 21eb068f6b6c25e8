"""How a tree of prefixes is drawn, whether of the disk tier or of the live index."""

from collections.abc import Callable, Iterator

from cachesvc.cli.render import seconds
from tiers.tier import TierName
from tiers.tree import Node, Tree

Label = Callable[[Node], str]


def key_label(node: Node) -> str:
    """A node by its key; what is partly filled has none."""
    return node.key.hex()[:12] if node.key else "(partial)"


def tree_lines(tree: Tree, label: Label = key_label) -> Iterator[str]:
    """One line a scope, one a node, and one where something is left off."""
    for root in tree.roots:
        yield f"scope {root.last.hex() if root.last else ''}"
        yield from _below(root, label, "")
    missing = tree.num_blocks - tree.num_seen
    if missing:
        plural = "s" if missing > 1 else ""
        yield f"{missing} block{plural} not shown: left off above, or a block before them is gone"


def _below(node: Node, label: Label, indent: str) -> Iterator[str]:
    rows = len(node.children) + (node.left_off > 0)
    for number, child in enumerate(node.children, start=1):
        yield f"{indent}{'└─' if number == rows else '├─'} {label(child)} {told(child)}"
        yield from _below(child, label, indent + ("   " if number == rows else "│  "))
    if node.left_off:
        yield f"{indent}└─ {node.left_off} more"


def told(node: Node) -> str:
    """`34 blocks, 2176 tokens`, and of the live index where they are and who uses them."""
    plural = "s" if node.num_blocks > 1 else ""
    parts = [f"{node.num_blocks} block{plural}", f"{node.num_tokens} tokens"]
    if node.runs == [(TierName.DISK, node.num_blocks)]:
        return ", ".join(parts)
    if len(node.runs) == 1:
        parts.append(node.runs[0][0])
    else:
        parts.append(" ".join(f"{place} {count}" for place, count in node.runs))
    if node.hits:
        parts.append(f"{node.hits} hit{'s' if node.hits > 1 else ''}")
    if node.num_pinned:
        parts.append(f"{node.num_pinned} in use")
    if node.idle_s >= 1:
        parts.append(f"idle {seconds(node.idle_s)}")
    return ", ".join(parts)
