"""`cachesvc cache tree`: the prefix tree of the disk tier or of a running server's tiers."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from api.format import number_of, seconds
from cachesvc.cli.live_server import running_server
from cachesvc.cli.options import DataDir, existing_data_dir
from cachesvc.cli.render import AsJson, answer, fail, note
from cachesvc.config.places import found_disk
from tiers.blocks.tree import MAX_DEPTH, Tree, TreeQuery, tree_json
from tiers.disk.inspection.view import open_view
from tiers.tier import TierName

SHOWN = 10_000  # nodes of a tree that a person or a page can handle

Node = Mapping[str, Any]  # of `tiers.blocks.tree.tree_json`


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
        asked = {"depth": depth, "tenant": tenant}
        document = running_server(data_dir).get("/admin/api/cache/tree", asked)
    else:
        document = tree_json(_on_disk(data_dir, depth, children))
    answer(document, json, *tree_lines(document))
    if not (document["num_blocks"] or live or json):
        note("no block is on disk; --live draws what the running server holds in memory")


def _on_disk(data_dir: Path | None, depth: int, children: int) -> Tree:
    query = TreeQuery(depth=depth, max_children=children, max_nodes=SHOWN, max_blocks=sys.maxsize)
    with open_view(found_disk(existing_data_dir(data_dir))) as view:
        return view.tree(query, time.time())


def tree_lines(document: Node) -> Iterator[str]:
    """One line per scope and per node of `tree_json`, and one where nodes are omitted."""
    for scope in document["scopes"]:
        owner = f" of {scope['owner']}" if scope.get("owner") else ""
        yield f"scope {scope['scope'] or ''}{owner}"
        yield from _below(scope["nodes"], scope["left_off"], "")
    missing = document["num_blocks"] - document["num_seen"]
    if missing:
        blocks = number_of(missing, "block")
        yield f"{blocks} not shown: left off above, or a block before them is gone"


def _below(nodes: Sequence[Node], left_off: int, indent: str) -> Iterator[str]:
    rows = len(nodes) + (left_off > 0)
    for number, node in enumerate(nodes, start=1):
        key = node["key"][:12] if node["key"] else "(partial)"
        yield f"{indent}{'└─' if number == rows else '├─'} {key} {summary(node)}"
        further = indent + ("   " if number == rows else "│  ")
        yield from _below(node["children"], node["left_off"], further)
    if left_off:
        yield f"{indent}└─ {left_off} more"


def summary(node: Node) -> str:
    """`34 blocks, 2176 tokens`; for a running server also the tiers and the number in use."""
    parts = [number_of(node["num_blocks"], "block"), number_of(node["num_tokens"], "token")]
    runs = [(run["place"], run["num_blocks"]) for run in node["runs"]]
    if runs == [(TierName.DISK, node["num_blocks"])]:
        return ", ".join(parts)
    if len(runs) == 1:
        parts.append(runs[0][0])
    else:
        parts.append(" ".join(f"{place} {count}" for place, count in runs))
    if node["hits"]:
        parts.append(number_of(node["hits"], "hit"))
    if node["num_in_use"]:
        parts.append(f"{node['num_in_use']} in use")
    if node["idle_s"] >= 1:
        parts.append(f"idle {seconds(node['idle_s'])}")
    return ", ".join(parts)
