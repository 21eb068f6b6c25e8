"""Rewriting a shard: to give space back, or to fit a smaller capacity. Needs the folder's lock.

Copies pinned blocks first, then the others, newest first, into a new shard beside the old one. One
rename then replaces the old file. Until then both are on the disk. After a kill at any moment,
either the old or the new file is there, complete.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiers.blocks.keys import PrefixKey
from tiers.disk.directory import DirectoryLock, read_meta, shard_path
from tiers.disk.format.record import num_blocks_of, window_key
from tiers.disk.format.rows import IndexEntry
from tiers.disk.inspection.export import make_record, proven, read_record
from tiers.disk.pin_file import keys_in_force
from tiers.disk.shard import Shard
from tiers.disk.storage import Storage
from tiers.disk.transaction import Writer
from tiers.errors import ConfigurationError, MissReason

ROWS = 16
NEW_SUFFIX = ".new"
Row = tuple[PrefixKey, IndexEntry]


@dataclass(frozen=True, slots=True)
class Compacted:
    """The result of rewriting one shard."""

    num_kept: int
    num_dropped: int
    file_bytes_before: int
    file_bytes: int


def compact_folder(root: Path) -> list[Compacted]:
    """Rewrite every shard of a folder that no server holds.

    Raises DirectoryLocked, ConfigurationError if there is no tier, and OSError for lack of room.
    """
    meta = read_meta(root)
    if meta is None:
        raise ConfigurationError(f"there is no disk cache in {root}; check --data-dir")
    lock = DirectoryLock(root)
    try:
        pinned = keys_in_force(root, time.time())
        size = meta.map_bytes
        return [
            compact(shard_path(root, number), size, size, Storage(), pinned)
            for number in range(meta.num_shards)
        ]
    finally:
        lock.release()


def compact(
    path: Path,
    old_map_bytes: int,
    map_bytes: int,
    storage: Storage,
    pinned: Sequence[PrefixKey] = (),
) -> Compacted:
    """Rewrites the shard in `path` for a map of `map_bytes`. `pinned` blocks are dropped last.

    Raises OSError if the disk has no room for the copy.
    """
    new = path.with_name(path.name + NEW_SUFFIX)
    shutil.rmtree(new, ignore_errors=True)
    source = Shard(path, old_map_bytes, storage=storage)
    try:
        need = min(source.totals.stored_bytes, map_bytes)
        free = shutil.disk_usage(path).free
        if free < need:
            raise OSError(f"rewriting {path} needs {need} bytes, and {free} are free")
        new.mkdir()
        target = Shard(new, map_bytes, storage=storage)
        try:
            num_kept = copy_blocks(source, target, pinned)
            target.sync()
            after = target.file_bytes()
        finally:
            target.close()
        before, num_blocks = source.file_bytes(), source.totals.num_blocks
    finally:
        source.close()
    swap_files(path, new)
    return Compacted(num_kept, num_blocks - num_kept, before, after)


def copy_blocks(source: Shard, target: Shard, pinned: Sequence[PrefixKey]) -> int:
    """Copies blocks until `target` is full: first the pinned ones in the given order, then the
    others, newest first.

    Returns the number copied.
    """
    newest = source.by_age(0, 1, newest_first=True)
    num_copied = 0
    if newest:
        with target.writing() as writer:
            writer.keep_sequences(newest[0][1].place.sequence)
    for rows in _in_order(source, pinned):
        with target.writing() as writer:
            copied, full = _copy(source, writer, rows)
        num_copied += copied
        if full:
            break
    with target.writing() as writer:
        writer.inherit(source.totals, source.days())
    return num_copied


def _in_order(source: Shard, pinned: Sequence[PrefixKey]) -> Iterator[list[Row]]:
    """The blocks to copy, up to ROWS at a time, each once."""
    first = {each: None for key in pinned for each in (key, window_key(key))}
    held = [(key, entry) for key in first for entry in source.find([key])]
    for start in range(0, len(held), ROWS):
        yield held[start : start + ROWS]
    before = 0
    while rows := source.by_age(before, ROWS, newest_first=True):
        before = rows[-1][1].place.sequence
        yield [row for row in rows if row[0] not in first]


def _copy(source: Shard, writer: Writer, rows: list[Row]) -> tuple[int, bool]:
    """Copies the sound ones of `rows`. Returns their number, and whether one had no room."""
    num_copied = 0
    for key, entry in rows:
        data = read_record(source, key, entry)
        header = proven(data, key)
        if isinstance(header, MissReason):
            continue
        if not writer.has_room(len(data)):
            return num_copied, True
        writer.put(make_record(bytes(data), header), entry.place.sequence, entry.place.used_s)
        num_copied += num_blocks_of(key)
    return num_copied, False


def swap_files(old: Path, new: Path) -> None:
    """Replaces `old`'s file by `new`'s.

    The lock file is removed before, because it has transaction numbers of the old file. It is
    removed again afterwards, because a command may have opened the old file in between and created
    one.
    """
    (old / "lock.mdb").unlink(missing_ok=True)
    (new / "data.mdb").replace(old / "data.mdb")
    (old / "lock.mdb").unlink(missing_ok=True)
    shutil.rmtree(new, ignore_errors=True)
