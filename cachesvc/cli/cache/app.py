"""`cachesvc cache`: what lies in the disk tier, beside a live server or without one.

The commands here read, in short transactions, so that a server goes on undisturbed, and `verify`
repairs; those that remove and move blocks are in `cache_change`, those about single blocks, also in
a running server's memory, in `cache_blocks`, those about prefixes in `cache_prefixes`.
"""

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from cachesvc.cli.cache.blocks import hot, list_blocks, show
from cachesvc.cli.cache.change import compact, evict, export, import_
from cachesvc.cli.cache.pins import pin, pins, unpin
from cachesvc.cli.cache.prefixes import big
from cachesvc.cli.cache.purge import purge
from cachesvc.cli.cache.tree import owners_in, tree_from_json, tree_lines
from cachesvc.cli.cache.watch import print_tiers, watch
from cachesvc.cli.live_server import running_server
from cachesvc.cli.options import DataDir, existing_data_dir
from cachesvc.cli.render import (
    AsJson,
    fail,
    note,
    number_of,
    percent,
    print_json,
    print_json_line,
    print_pairs,
    progress,
    seconds,
    size,
)
from cachesvc.config import disk_path
from cachesvc.server.server_file import find_server
from tiers.blocks.tree import MAX_DEPTH, TreeQuery, tree_json
from tiers.disk.maintenance import Verified
from tiers.disk.maintenance import verify as verify_shard
from tiers.disk.view import DiskSummary, DiskView, open_shards, open_view

SHOWN = 10_000  # nodes of a tree: what a person or a page can still take in

app = typer.Typer(no_args_is_help=True, help="Look into the disk tier and maintain it")


@app.command()
def stats(
    data_dir: DataDir = None,
    interval: Annotated[
        float | None, typer.Option("--interval", "-i", min=0.1, help="Repeat every so many seconds")
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", "-c", min=1, help="Stop after so many")
    ] = None,
    json: AsJson = False,
) -> None:
    """The disk tier: blocks, bytes, compression, who holds the directory; live, every tier.

    With -i, one line an interval of what went through the tiers of the running server.
    """
    path = existing_data_dir(data_dir)
    server = find_server(path)
    if interval is not None and server is not None:
        watch(server, interval, count=count, json=json)
        return
    tiers = server.get("/admin/api/stats")["cache"]["tiers"] if server is not None else {}
    with _view(data_dir) as view:
        for turn in itertools.count(1):
            summary = view.summary()
            if json:
                (print_json if interval is None else print_json_line)(
                    _summary_json(summary) | ({"tiers": tiers} if tiers else {})
                )
            else:
                print_pairs(_summary_pairs(summary))
                print_tiers(tiers)
            if interval is None or turn == count:
                return
            time.sleep(interval)


@app.command()
def tree(
    data_dir: DataDir = None,
    depth: Annotated[int, typer.Option(min=1, max=MAX_DEPTH, help="Levels below each scope")] = 6,
    children: Annotated[int, typer.Option(min=1, help="At most so many below one prefix")] = 50,
    live: Annotated[
        bool, typer.Option(help="All tiers of the running server, with hits, and whose they are")
    ] = False,
    tenant: Annotated[str, typer.Option(help="With --live: only this tenant or group")] = "",
    json: AsJson = False,
) -> None:
    """Blocks as the tree of prefixes that they are: those on disk, or of all tiers with --live."""
    if tenant and not live:
        fail("--tenant asks the running server, which knows whose blocks are whose: add --live", 2)
    if live:
        asked = urlencode({"depth": depth, "tenant": tenant})
        told = running_server(data_dir).get(f"/admin/api/cache/tree?{asked}")
        if json:
            print_json(told)
            return
        for line in tree_lines(tree_from_json(told), names=owners_in(told)):
            typer.echo(line)
        return
    query = TreeQuery(depth=depth, max_children=children, max_nodes=SHOWN, max_blocks=sys.maxsize)
    with _view(data_dir) as view:
        grown = view.tree(query, time.time())
    if json:
        print_json(tree_json(grown))
        return
    for line in tree_lines(grown):
        typer.echo(line)
    if not grown.num_blocks:
        note("no block is on disk; --live draws what the running server holds in memory")


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
        num_blocks = sum(shard.read_totals().num_blocks for shard in shards)
        with progress("verifying", num_blocks) as advance:
            for shard in shards:
                total = total.plus(verify_shard(shard, repair=repair, advance=advance))
    elapsed_s = time.monotonic() - started
    if json:
        print_json(asdict(total) | {"sound": total.sound, "seconds": round(elapsed_s, 3)})
    else:
        typer.echo(
            f"{number_of(total.num_blocks, 'block')} ({size(total.logical_bytes)} of KV) "
            f"as they were written; checked in {seconds(elapsed_s)}"
        )
        for reason, num_bad in total.bad.items():
            typer.echo(f"{number_of(num_bad, 'bad block')}: {reason}")
        for problem in total.structure:
            typer.echo(problem)
        if total.num_repaired:
            typer.echo(f"{total.num_repaired} of them were deleted")
    if not total.sound and total.num_repaired < sum(total.bad.values()):
        fail("the disk tier holds bad blocks; none of them will be served. Remove: --repair")


app.command("ls")(list_blocks)
app.command()(show)
app.command()(big)
app.command()(hot)
app.command()(evict)
app.command()(purge)
app.command()(pin)
app.command()(unpin)
app.command()(pins)
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
    not_closed = "no, the server has it open" if summary.server else "not cleanly"
    return {
        "directory": summary.path,
        "server": summary.server or "none running",
        "blocks": summary.num_blocks,
        "files": f"{size(summary.file_bytes)} of {size(summary.map_bytes)} "
        f"({percent(summary.file_bytes, summary.map_bytes)})",
        "KV": f"{size(summary.logical_bytes)}, stored as {size(summary.stored_bytes)} "
        f"(ratio {summary.ratio:.2f})",
        "scopes": summary.num_scopes,
        "shards": summary.num_shards,
        "ever stored": f"{number_of(summary.num_stored, 'block')}, {size(summary.written_bytes)}",
        "ever evicted": number_of(summary.num_evicted, "block"),
        "closed": "cleanly" if summary.clean else not_closed,
    }
