"""Rewriting a shard: to give space back, or to fit a smaller capacity. Needs the folder's lock.

The newest blocks are copied, newest first, into a new shard beside the old one; its file then takes
the old one's place by one rename. Until then both lie on the disk. Killed at any moment, either the
old or the new file stands, whole.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from tiers.disk_directory import DirectoryLock, read_meta, shard_path
from tiers.disk_storage import Storage
from tiers.disk_transfer import make_record, proven, read_record
from tiers.errors import ConfigurationError, MissReason
from tiers.shard import Shard

ROWS = 16
NEW_SUFFIX = ".new"


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a rewrite did to one shard."""

    num_kept: int
    num_dropped: int
    file_bytes_before: int
    file_bytes: int


def compact_folder(root: Path, storage: Storage | None = None) -> list[Compacted]:
    """Rewrite every shard of a folder that no server holds.

    Raises DirectoryLocked; ConfigurationError where there is no tier; OSError for lack of room.
    """
    meta = read_meta(root)
    if meta is None:
        raise ConfigurationError(f"there is no disk cache in {root}; check --data-dir")
    lock = DirectoryLock(root)
    try:
        return [
            compact(shard_path(root, number), meta.map_bytes, meta.map_bytes, storage or Storage())
            for number in range(meta.num_shards)
        ]
    finally:
        lock.release()


def compact(path: Path, old_map_bytes: int, map_bytes: int, storage: Storage) -> Compacted:
    """Rewrite the shard in `path` under a map of `map_bytes`.

    Raises OSError where the disk has no room for the copy.
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
            num_kept = copy_newest(source, target)
            target.sync()
            after = target.file_bytes()
        finally:
            target.close()
        before, num_blocks = source.file_bytes(), source.totals.num_blocks
    finally:
        source.close()
    swap_files(path, new)
    return Compacted(num_kept, num_blocks - num_kept, before, after)


def copy_newest(source: Shard, target: Shard) -> int:
    """Copy blocks, newest first, until `target` is as full as it may be; returns how many."""
    num_copied, before = 0, 0
    full = False
    while not full and (rows := source.by_age(before, ROWS, newest_first=True)):
        before = rows[-1][1].place.sequence
        with target.writing() as writer:
            writer.keep_sequences(rows[0][1].place.sequence)
            for key, entry in rows:
                data = read_record(source, key, entry)
                header = proven(data, key)
                if isinstance(header, MissReason):
                    continue
                full = not writer.has_room(len(data))
                if full:
                    break
                record = make_record(bytes(data), header)
                writer.put(record, entry.place.sequence, entry.place.used_s)
                num_copied += 1
    with target.writing() as writer:
        writer.inherit(source.totals, source.days())
    return num_copied


def swap_files(old: Path, new: Path) -> None:
    """Put `new`'s file in place of `old`'s.

    The lock file goes first: it holds transaction numbers of the file it was made for.
    """
    (old / "lock.mdb").unlink(missing_ok=True)
    (new / "data.mdb").replace(old / "data.mdb")
    shutil.rmtree(new, ignore_errors=True)
