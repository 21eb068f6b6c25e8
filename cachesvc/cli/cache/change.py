"""`cachesvc cache` commands that change the disk tier.

They also work while a server runs, in short transactions of their own. They cannot reach blocks in
the server's memory, and say so if it matters.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Annotated

import typer

from api.format import number_of, size
from cachesvc.cli import options
from cachesvc.cli.cache.select import find_scope, server_of
from cachesvc.cli.options import DataDir, existing_data_dir
from cachesvc.cli.render import AsJson, answer, confirm, fail, note, progress
from cachesvc.config.places import found_disk
from tiers.blocks.keys import PrefixKey
from tiers.disk.format.rows import IndexEntry
from tiers.disk.inspection.maintenance import Rule, chosen, give_back, remove
from tiers.disk.inspection.opening import open_shards
from tiers.disk.inspection.view import DiskView
from tiers.disk.pin_file import pinned_keys
from tiers.disk.shard import Shard, ShardDamaged
from tiers.disk.storage import StorageError
from tiers.tier import Removed

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
    with _view(data_dir) as view:
        rule = _scope_rule(view, scope)
        if older_than is not None:
            before_s = time.time() - older_than
            rule = _both(rule, lambda key, entry: entry.place.used_s <= before_s)
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
    with _view(data_dir) as view:
        before, after = _give_back(view.shards, view.path)
    files = {"file_bytes_before": before, "file_bytes": after}
    answer(files, json, f"files {size(before)} -> {size(after)}")


def _give_back(shards: Sequence[Shard], path: Path) -> tuple[int, int]:
    try:
        return give_back(shards)
    except (*StorageError, ShardDamaged) as error:
        fail(
            f"the file system took nothing back: {error}; where no server runs, {path} can be "
            "removed: what it holds is computed again"
        )


@contextmanager
def _view(data_dir: Path | None) -> Iterator[DiskView]:
    path = found_disk(existing_data_dir(data_dir))
    with open_shards(path, readonly=False, groups=True) as (meta, shards):
        yield DiskView(path, meta, shards)


def _scope_rule(view: DiskView, starts: Sequence[str] | None) -> Rule:
    if not starts:
        return lambda key, entry: True
    accounts = view.accounts()
    roots = frozenset(find_scope(accounts, start) for start in starts)
    return lambda key, entry: entry.scope in roots


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


def _sum(parts: Iterable[Removed]) -> Removed:
    return reduce(Removed.plus, parts, Removed())


def _amount(removed: Removed) -> str:
    return f"{number_of(removed.num_blocks, 'block')} ({size(removed.stored_bytes)})"


def _tell_removed(gone: Removed, returned_bytes: int, path: Path, json: bool) -> None:
    server = server_of(path)
    told = gone._asdict() | {"returned_bytes": returned_bytes, "server": server}
    back = f"{size(returned_bytes)} returned to the file system"
    answer(told, json, f"{_amount(gone)} evicted; {back}")
    if server is not None:
        note(
            f"a server holds this directory ({server}): blocks in its memory stay, and it may "
            "write them to disk again; stop it first to be rid of them"
        )
