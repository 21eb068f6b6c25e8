"""`cachesvc cache` commands that change the disk tier or move its blocks.

They also work while a server runs, in short transactions of their own. They cannot reach blocks in
the server's memory, and say so if it matters.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import rich.progress
import typer
from rich.console import Console

from api.format import number_of, size
from cachesvc.cli import options
from cachesvc.cli.cache.select import find_block, find_scope, server_of
from cachesvc.cli.options import DataDir, data_dir_of, existing_data_dir
from cachesvc.cli.render import AsJson, confirm, fail, note, print_json, progress
from cachesvc.config.places import found_disk
from cachesvc.config.sources import load_settings
from cachesvc.server.listen import make_data_dir
from tiers.blocks.keys import PrefixKey
from tiers.disk.directory import prepare, read_meta
from tiers.disk.format.rows import IndexEntry
from tiers.disk.inspection import export as disk_transfer
from tiers.disk.inspection.export import Moved, Rule, chain_rule, import_blocks
from tiers.disk.inspection.maintenance import chosen, give_back, remove
from tiers.disk.inspection.opening import open_disks, open_shards, placed
from tiers.disk.inspection.view import DiskView, open_view
from tiers.disk.pin_file import pinned_keys
from tiers.disk.shard import Shard, ShardDamaged
from tiers.disk.storage import StorageError
from tiers.tier import Removed

STREAM = Path("-")  # standard input or output

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")]
Scopes = Annotated[
    list[str] | None,
    typer.Option(
        "--scope", help="Blocks of the scope whose root starts with this (hex); repeatable"
    ),
]


def evict(
    data_dir: DataDir = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            parser=options.duration,
            metavar="DURATION",
            help="Blocks unused for this long, such as 7d",
        ),
    ] = None,
    scope: Scopes = None,
    num_bytes: Annotated[
        int | None,
        typer.Option(
            "--bytes",
            parser=options.size,
            metavar="SIZE",
            help="About this many bytes, least recently used first",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every block")] = False,
    pinned: Annotated[bool, typer.Option("--pinned", help="Pinned blocks as well")] = False,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Remove blocks that match all given options. Safe beside a running server."""
    if not (everything or scope) and older_than is None and num_bytes is None:
        fail("say what to evict: --older-than, --scope, --bytes, or --all for every block", 2)
    with _view(data_dir, readonly=False) as view:
        rule = _age_rule(_scope_rule(view, scope), older_than)
        if not pinned:
            kept = pinned_keys(view.path)
            rule = _both(rule, lambda key, entry: key not in kept)
        share = None if num_bytes is None else -(-num_bytes // len(view.shards))
        planned = _sum(
            size for shard in view.shards for _, size in chosen(shard, rule, at_most_bytes=share)
        )
        if planned.num_blocks:
            confirm(f"Evict {_amount(planned)} from {view.path}?", yes=yes)
        before = sum(shard.file_bytes() for shard in view.shards)
        with _counted(rule, view, "evicting") as counted:
            gone = _sum(remove(shard, counted, at_most_bytes=share) for shard in view.shards)
        _, after = _give_back(view.shards, view.path)
    _tell_removed(gone, max(0, before - after), view.path, json)


def compact(data_dir: DataDir = None, json: AsJson = False) -> None:
    """Return the files' free space to the file system. Safe beside a running server."""
    with _view(data_dir, readonly=False) as view:
        before, after = _give_back(view.shards, view.path)
    if json:
        print_json({"file_bytes_before": before, "file_bytes": after})
    else:
        typer.echo(f"files {size(before)} -> {size(after)}")


def _give_back(shards: Sequence[Shard], path: Path) -> tuple[int, int]:
    try:
        return give_back(shards)
    except (*StorageError, ShardDamaged) as error:
        fail(
            f"the file system took nothing back: {error}; where no server runs, {path} can be "
            "removed: what it holds is computed again"
        )


def export(
    file: Annotated[Path, typer.Argument(help="File to write; - for standard output")],
    data_dir: DataDir = None,
    scope: Scopes = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="Block whose key starts with this, with all blocks before and after it; repeatable"
        ),
    ] = None,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Write verified blocks to a file for `cachesvc cache import`. Safe beside a running server."""
    if file == STREAM and json:
        fail("--json and the blocks would both go to standard output; name a file", 2)
    if file != STREAM and file.exists():
        confirm(f"Overwrite {file}?", yes=yes)
    with _view(data_dir, readonly=True) as view:
        rule = _scope_rule(view, scope)
        if key:
            roots = [find_block(view, start).key for start in key]
            rule = _both(rule, chain_rule(view.shards, roots))
        try:
            with _counted(rule, view, "exporting") as counted, _written(file) as to:
                moved = disk_transfer.export(view.shards, to, counted)
        except OSError as error:
            fail(f"the export to {file} failed: {error.strerror or error}")
    if json:
        print_json(_moved_json(moved, file))
    else:
        note(
            f"{number_of(moved.num_blocks, 'block')} ({size(moved.nbytes)}) exported to "
            f"{_name(file, 'output')}"
        )
    if moved.bad:
        fail(f"{_bad(moved)} left out; `cachesvc cache verify --repair` removes such blocks")


def import_(
    file: Annotated[Path, typer.Argument(help="File to read; - for standard input")],
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Store the blocks of an export after verifying each. Safe beside a running server.

    If there is no room, the least recently used blocks are evicted, as in a server. A machine
    without a disk tier gets one with the size in the settings.
    """
    _prepare(data_dir)
    path = found_disk(existing_data_dir(data_dir))
    with open_disks(path, readonly=False) as disks:
        shards = [shard for disk in disks for shard in disk.shards]
        try:
            with _read(file) as source:
                moved = import_blocks(shards, source, placed(disks))
        except ValueError as error:
            fail(f"{_name(file, 'input')}: {error}; `cachesvc cache export` makes one")
        except OSError as error:
            fail(f"the import of {file} failed: {error.strerror or error}")
    if json:
        print_json(_moved_json(moved, file) | {"server": server_of(path)})
    else:
        typer.echo(
            f"{number_of(moved.num_blocks, 'block')} ({size(moved.nbytes)}) imported, "
            f"{moved.num_held} were there already"
        )
    if moved.bad:
        note(f"{_bad(moved)} refused")
    if moved.num_refused:
        refused = number_of(moved.num_refused, "block")
        note(f"{refused} found no room; is too much pinned, or read by another command?")
    if not moved.complete:
        fail(f"{_name(file, 'input')} ends early; complete blocks were kept. Export it again")
    if moved.bad:
        fail("some blocks of the export are damaged; verify the tier that they came from")


def _prepare(data_dir: Path | None) -> None:
    path = data_dir_of(data_dir)
    if read_meta(found_disk(path)) is not None:
        return
    make_data_dir(path)
    cache = load_settings().settings.cache
    if not cache.disk_bytes:
        fail("cache.disk_bytes is 0, which turns the disk tier off; give it a size to import into")
    prepare(found_disk(path), cache.disk_bytes, cache.disk_reserve_bytes)
    note(f"{path} had no disk tier; one of {size(cache.disk_bytes)} was created")


@contextmanager
def _view(data_dir: Path | None, *, readonly: bool) -> Iterator[DiskView]:
    path = found_disk(existing_data_dir(data_dir))
    if readonly:
        with open_view(path) as view:
            yield view
        return
    with open_shards(path, readonly=False, groups=True) as (meta, shards):
        yield DiskView(path, meta, shards)


def _scope_rule(view: DiskView, starts: Sequence[str] | None) -> Rule:
    if not starts:
        return lambda key, entry: True
    accounts = view.accounts()
    roots = frozenset(find_scope(accounts, start) for start in starts)
    return lambda key, entry: entry.scope in roots


def _age_rule(rule: Rule, older_than_s: float | None) -> Rule:
    if older_than_s is None:
        return rule
    before_s = time.time() - older_than_s
    return _both(rule, lambda key, entry: entry.place.used_s <= before_s)


def _both(first: Rule, second: Rule) -> Rule:
    return lambda key, entry: first(key, entry) and second(key, entry)


@contextmanager
def _counted(rule: Rule, view: DiskView, what: str) -> Iterator[Rule]:
    """`rule` with a progress bar that advances at each block."""
    with progress(what, sum(shard.read_totals().num_blocks for shard in view.shards)) as advance:

        def judge(key: PrefixKey, entry: IndexEntry) -> bool:
            advance(1)
            return rule(key, entry)

        yield judge


@contextmanager
def _written(file: Path) -> Iterator[BinaryIO]:
    """Standard output, or `file`, which appears only when it is complete."""
    if file == STREAM:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    part = file.with_name(f"{file.name}.part")
    try:
        with part.open("wb") as to:
            yield to
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _read(file: Path) -> Iterator[BinaryIO]:
    if file == STREAM:
        yield sys.stdin.buffer
        return
    console = Console(stderr=True)
    quiet = not console.is_terminal
    with rich.progress.open(
        file, "rb", description="importing", console=console, transient=True, disable=quiet
    ) as source:
        yield source


def _sum(parts: Iterable[Removed]) -> Removed:
    return reduce(Removed.plus, parts, Removed())


def _amount(removed: Removed) -> str:
    return f"{number_of(removed.num_blocks, 'block')} ({size(removed.stored_bytes)})"


def _tell_removed(gone: Removed, returned_bytes: int, path: Path, json: bool) -> None:
    server = server_of(path)
    if json:
        print_json(gone._asdict() | {"returned_bytes": returned_bytes, "server": server})
    else:
        typer.echo(f"{_amount(gone)} evicted; {size(returned_bytes)} returned to the file system")
    if server is not None:
        note(
            f"a server holds this directory ({server}): blocks in its memory stay, and it may "
            "write them to disk again; stop it first to be rid of them"
        )


def _moved_json(moved: Moved, file: Path) -> dict[str, Any]:
    return {"file": str(file), **asdict(moved)}


def _bad(moved: Moved) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in moved.bad.items())
    return f"{sum(moved.bad.values())} bad blocks ({reasons}) were"


def _name(file: Path, stream: str) -> str:
    return f"standard {stream}" if file == STREAM else str(file)
