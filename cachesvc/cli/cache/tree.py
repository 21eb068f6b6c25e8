"""`cachesvc cache tree`: the prefix tree of a running server's tiers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from api.format import number_of, seconds
from cachesvc.cli.live_server import running_server
from cachesvc.cli.options import DataDir
from cachesvc.cli.render import AsJson, answer
from tiers.blocks.tree import MAX_DEPTH

Node = Mapping[str, Any]  # of `tiers.blocks.tree.tree_json`


def tree(
    data_dir: DataDir = None,
    depth: Annotated[int, typer.Option(min=1, max=MAX_DEPTH, help="Levels below each scope")] = 6,
    tenant: Annotated[str, typer.Option(help="Only this tenant or group")] = "",
    json: AsJson = False,
) -> None:
    """Show the blocks of the running server's tiers as a tree of prefixes."""
    asked = {"depth": depth, "tenant": tenant}
    document = running_server(data_dir).get("/admin/api/cache/tree", asked)
    answer(document, json, *tree_lines(document))


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
    """`34 blocks, 2176 tokens, device, 4 hits`, with the number in use."""
    parts = [number_of(node["num_blocks"], "block"), number_of(node["num_tokens"], "token")]
    runs = [(run["place"], run["num_blocks"]) for run in node["runs"]]
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
