"""`cachesvc cache tree`: the prefix tree of the disk tier or of a running server's tiers."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from api.format import number_of, seconds
from cachesvc.cli.live_server import running_server
from cachesvc.cli.options import DataDir, existing_data_dir
from cachesvc.cli.render import AsJson, fail, note, print_json
from cachesvc.config.places import found_disk
from tiers.blocks.keys import PrefixKey
from tiers.blocks.tree import MAX_DEPTH, Tree, TreeNode, TreeQuery, tree_json
from tiers.disk.inspection.view import open_view
from tiers.tier import TierName

SHOWN = 10_000  # nodes of a tree that a person or a page can handle

Label = Callable[[TreeNode], str]


NO_NAMES: Mapping[PrefixKey, str] = {}


def tree(
    data_dir: DataDir = None,
    depth: Annotated[int, typer.Option(min=1, max=MAX_DEPTH, help="Levels below each scope")] = 6,
    children: Annotated[int, typer.Option(min=1, help="Children shown for each prefix")] = 50,
    live: Annotated[
        bool, typer.Option(help="All tiers of the running server, with hits and tenants")
    ] = False,
    tenant: Annotated[str, typer.Option(help="With --live: only this tenant or group")] = "",
    json: AsJson = False,
) -> None:
    """Show blocks as a tree of prefixes: on disk, or in all tiers with --live."""
    if tenant and not live:
        fail("--tenant asks the running server, which knows the owners of blocks: add --live", 2)
    if live:
        asked = urlencode({"depth": depth, "tenant": tenant})
        document = running_server(data_dir).get(f"/admin/api/cache/tree?{asked}")
        if json:
            print_json(document)
            return
        for line in tree_lines(tree_from_json(document), names=owners_in(document)):
            typer.echo(line)
        return
    query = TreeQuery(depth=depth, max_children=children, max_nodes=SHOWN, max_blocks=sys.maxsize)
    with open_view(found_disk(existing_data_dir(data_dir))) as view:
        grown = view.tree(query, time.time())
    if json:
        print_json(tree_json(grown))
        return
    for line in tree_lines(grown):
        typer.echo(line)
    if not grown.num_blocks:
        note("no block is on disk; --live draws what the running server holds in memory")


def tree_from_json(document: Mapping[str, Any]) -> Tree:
    """The inverse of `tiers.blocks.tree.tree_json`, without token ids."""
    roots = []
    for scope in document["scopes"]:
        key = _key(scope["scope"])
        children = [_node(each) for each in scope["nodes"]]
        roots.append(TreeNode(key, key, children=children, left_off=scope["left_off"]))
    return Tree(roots, document["num_blocks"], document["num_seen"])


def owners_in(document: Mapping[str, Any]) -> dict[PrefixKey, str]:
    """The owner of each scope, if the server reports it."""
    found = ((_key(scope["scope"]), scope.get("owner")) for scope in document["scopes"])
    return {key: owner for key, owner in found if key is not None and owner}


def _node(document: Mapping[str, Any]) -> TreeNode:
    return TreeNode(
        _key(document["key"]),
        _key(document["last_key"]),
        num_blocks=document["num_blocks"],
        num_tokens=document["num_tokens"],
        places=[run["place"] for run in document["runs"] for _ in range(run["num_blocks"])],
        num_in_use=document["num_in_use"],
        num_clean=document["num_clean"],
        hits=document["hits"],
        idle_s=document["idle_s"],
        children=[_node(child) for child in document["children"]],
        left_off=document["left_off"],
    )


def _key(text: str | None) -> PrefixKey | None:
    return PrefixKey(bytes.fromhex(text)) if text else None


def key_label(node: TreeNode) -> str:
    """A node's key as a label; a partly filled block has none."""
    return node.key.hex()[:12] if node.key else "(partial)"


def tree_lines(
    tree: Tree, label: Label = key_label, *, names: Mapping[PrefixKey, str] = NO_NAMES
) -> Iterator[str]:
    """One line per scope and per node, and one where nodes are omitted."""
    for root in tree.roots:
        owner = names.get(root.last) if root.last else None
        yield f"scope {root.last.hex() if root.last else ''}" + (f" of {owner}" if owner else "")
        yield from _below(root, label, "")
    missing = tree.num_blocks - tree.num_seen
    if missing:
        blocks = number_of(missing, "block")
        yield f"{blocks} not shown: left off above, or a block before them is gone"


def _below(node: TreeNode, label: Label, indent: str) -> Iterator[str]:
    rows = len(node.children) + (node.left_off > 0)
    for number, child in enumerate(node.children, start=1):
        yield f"{indent}{'└─' if number == rows else '├─'} {label(child)} {summary(child)}"
        yield from _below(child, label, indent + ("   " if number == rows else "│  "))
    if node.left_off:
        yield f"{indent}└─ {node.left_off} more"


def summary(node: TreeNode) -> str:
    """`34 blocks, 2176 tokens`; for a running server also the tiers and the number in use."""
    parts = [number_of(node.num_blocks, "block"), number_of(node.num_tokens, "token")]
    if node.runs == [(TierName.DISK, node.num_blocks)]:
        return ", ".join(parts)
    if len(node.runs) == 1:
        parts.append(node.runs[0][0])
    else:
        parts.append(" ".join(f"{place} {count}" for place, count in node.runs))
    if node.hits:
        parts.append(number_of(node.hits, "hit"))
    if node.num_in_use:
        parts.append(f"{node.num_in_use} in use")
    if node.idle_s >= 1:
        parts.append(f"idle {seconds(node.idle_s)}")
    return ", ".join(parts)
