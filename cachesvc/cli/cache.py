"""`cachesvc cache`: what lies in the disk tier, beside a live server or without one.

The commands here read, in short transactions, so that a server goes on undisturbed, and `verify`
repairs; those that remove and move blocks are in `cache_change`. The hot tiers live in the
server's memory: `/metrics` and the admin pages tell of those.
"""

import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from cachesvc.cli.cache_change import compact, evict, export, import_, purge
from cachesvc.cli.cache_select import find_block
from cachesvc.cli.options import DataDir, existing_data_dir
from cachesvc.cli.render import (
    AsJson,
    fail,
    note,
    percent,
    print_json,
    print_pairs,
    print_table,
    seconds,
    size,
)
from cachesvc.cli.tree import tree_lines
from cachesvc.config import disk_path
from tiers.codec import CodecId
from tiers.disk_ops import Verified
from tiers.disk_ops import verify as verify_shard
from tiers.inspect import BlockInfo, DiskSummary, DiskView, open_shards, open_view
from tiers.tree import MAX_DEPTH, TreeQuery, tree_json

SHOWN = 10_000  # nodes of a tree: what a person or a page can still take in

app = typer.Typer(no_args_is_help=True, help="Look into the disk tier and maintain it")


@app.command()
def stats(
    data_dir: DataDir = None,
    interval: Annotated[
        float | None, typer.Option("--interval", "-i", min=0.1, help="Repeat every so many seconds")
    ] = None,
    json: AsJson = False,
) -> None:
    """Blocks, bytes, compression and who holds the directory."""
    with _view(data_dir) as view:
        while True:
            summary = view.summary()
            if json:
                print_json(_summary_json(summary))
            else:
                print_pairs(_summary_pairs(summary))
            if interval is None:
                return
            time.sleep(interval)


@app.command("ls")
def list_blocks(
    data_dir: DataDir = None,
    scope: Annotated[
        str | None, typer.Option(help="Only blocks of the scope whose root begins so (hex)")
    ] = None,
    older_than: Annotated[
        float | None, typer.Option(help="Only blocks that nobody used for so many seconds")
    ] = None,
    oldest: Annotated[bool, typer.Option(help="In order of eviction, next to go first")] = False,
    limit: Annotated[int, typer.Option(min=0, help="At most so many blocks; 0 for all")] = 100,
    json: AsJson = False,
) -> None:
    """List blocks: key, parent, tokens, size and age."""
    now_s = time.time()
    with _view(data_dir) as view:
        wanted = (
            block
            for block in view.blocks(oldest=oldest)
            if block.scope.hex().startswith((scope or "").lower())
            and (older_than is None or now_s - block.used_s >= older_than)
        )
        blocks = list(islice(wanted, limit or None))
        total = view.summary().num_blocks
    if json:
        print_json([_block_json(block) for block in blocks])
        return
    print_table(
        ("key", "parent", "tokens", "stored", "ratio", "written", "used"),
        [_block_row(block, now_s) for block in blocks],
        right=("tokens", "stored", "ratio", "written", "used"),
    )
    if len(blocks) < total:
        note(f"{len(blocks)} of {total} blocks; --limit 0 lists all that match")


@app.command()
def show(
    key: Annotated[str, typer.Argument(help="A block's key, or how it begins (hex)")],
    data_dir: DataDir = None,
    tokens: Annotated[bool, typer.Option(help="Print the token ids as well")] = False,
    json: AsJson = False,
) -> None:
    """One block: its identity, the prefix that leads to it, and how it is stored."""
    with _view(data_dir) as view:
        block = find_block(view, key)
        chain = view.chain(block)
        children = [child.key.hex() for child in view.children().get(block.key, [])]
    told = _block_json(block) | {
        "depth": len(chain),
        "complete": chain[0].parent == chain[0].scope,
        "children": children,
    }
    if tokens:
        told["token_ids"] = list(array("i", block.tokens))
    if json:
        print_json(told)
        return
    print_pairs(
        told
        | {
            "stored_bytes": size(block.stored_bytes),
            "logical_bytes": size(block.logical_bytes),
            "children": ", ".join(children) or "-",
        }
    )


@app.command()
def tree(
    data_dir: DataDir = None,
    depth: Annotated[int, typer.Option(min=1, max=MAX_DEPTH, help="Levels below each scope")] = 6,
    children: Annotated[int, typer.Option(min=1, help="At most so many below one prefix")] = 50,
    json: AsJson = False,
) -> None:
    """Blocks as the tree of prefixes that they are."""
    query = TreeQuery(depth=depth, max_children=children, max_nodes=SHOWN, max_blocks=sys.maxsize)
    with _view(data_dir) as view:
        grown = view.tree(query, time.time())
    if json:
        print_json(tree_json(grown))
        return
    for line in tree_lines(grown):
        typer.echo(line)


@app.command()
def verify(
    data_dir: DataDir = None,
    repair: Annotated[bool, typer.Option(help="Delete what is not as it was written")] = False,
    json: AsJson = False,
) -> None:
    """Read every block as a hit would, and check it whole. Exits with 1 if one is bad."""
    started = time.monotonic()
    total = Verified()
    with open_shards(disk_path(existing_data_dir(data_dir)), readonly=not repair) as (_, shards):
        for shard in shards:
            total = total.plus(verify_shard(shard, repair=repair))
    elapsed_s = time.monotonic() - started
    if json:
        print_json(asdict(total) | {"sound": total.sound, "seconds": round(elapsed_s, 3)})
    else:
        typer.echo(
            f"{total.num_blocks} blocks ({size(total.logical_bytes)} of KV) are as they were "
            f"written; checked in {seconds(elapsed_s)}"
        )
        for reason, count in total.bad.items():
            typer.echo(f"{count} blocks are bad: {reason}")
        for problem in total.structure:
            typer.echo(problem)
        if total.num_repaired:
            typer.echo(f"{total.num_repaired} of them were deleted")
    if not total.sound and total.num_repaired < sum(total.bad.values()):
        fail("the disk tier holds bad blocks; none of them will be served. Remove: --repair")


app.command()(evict)
app.command()(purge)
app.command()(compact)
app.command()(export)
app.command("import")(import_)


@contextmanager
def _view(data_dir: Path | None) -> Iterator[DiskView]:
    with open_view(disk_path(existing_data_dir(data_dir))) as view:
        yield view


def _summary_json(summary: DiskSummary) -> dict[str, Any]:
    return {"tier": "disk", **asdict(summary), "ratio": round(summary.ratio, 4)}


def _summary_pairs(summary: DiskSummary) -> dict[str, object]:
    return {
        "directory": summary.path,
        "server": summary.server or "none running",
        "blocks": summary.num_blocks,
        "files": f"{size(summary.file_bytes)} of {size(summary.capacity_bytes)} "
        f"({percent(summary.file_bytes, summary.capacity_bytes)})",
        "KV": f"{size(summary.logical_bytes)}, stored as {size(summary.stored_bytes)} "
        f"(ratio {summary.ratio:.2f})",
        "scopes": summary.num_scopes,
        "shards": summary.num_shards,
        "ever stored": f"{summary.num_stored} blocks, {size(summary.written_bytes)}",
        "ever evicted": f"{summary.num_evicted} blocks",
        "closed": "cleanly" if summary.clean else "still open, or not cleanly",
    }


def _block_json(block: BlockInfo) -> dict[str, Any]:
    return {
        "key": block.key.hex(),
        "parent": block.parent.hex(),
        "scope": block.scope.hex(),
        "tier": "disk",
        "num_tokens": block.num_tokens,
        "stored_bytes": block.stored_bytes,
        "logical_bytes": block.logical_bytes,
        "codec": CodecId(block.codec).name.lower(),
        "written_s": block.written_s,
        "used_s": block.used_s,
        "shard": block.shard,
        "fault": block.why,
    }


def _block_row(block: BlockInfo, now_s: float) -> tuple[object, ...]:
    ratio = f"{block.logical_bytes / block.stored_bytes:.2f}" if block.stored_bytes else "-"
    return (
        block.key.hex()[:16],
        "(root)" if block.parent == block.scope else block.parent.hex()[:16],
        block.num_tokens,
        size(block.stored_bytes),
        ratio,
        _ago(now_s - block.written_s),
        _ago(now_s - block.used_s),
    )


def _ago(age_s: float) -> str:
    return f"{seconds(round(age_s))} ago" if age_s >= 1 else "now"
