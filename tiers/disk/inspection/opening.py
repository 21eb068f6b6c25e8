"""Opens the folders of a disk tier beside their server, and repairs those without one.

Used by the command line. A server opens its own with `tiers.disk.open`.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tiers.disk.counts import DiskCounts
from tiers.disk.directory import FORMAT, DirectoryLock, Meta, group_folders, read_meta, shard_path
from tiers.disk.guard import DiskGuard
from tiers.disk.pin_file import pinned_keys
from tiers.disk.recovery.check import TooLong, check_shard, last_transaction
from tiers.disk.room import DiskRoom, limit_shards
from tiers.disk.shard import Shard, ShardDamaged
from tiers.disk.slot import Opening, ShardSlot
from tiers.disk.storage import Storage, StorageError
from tiers.errors import ConfigurationError, DirectoryLocked, MissReason

logger = logging.getLogger(__name__)

READ_CHECK_S = 5.0  # a command that only reads checks a shard no longer than this


def refuse_damaged(folder: Path, map_bytes: int, within_s: float) -> None:
    """Raises ConfigurationError for a shard that could crash LMDB, unless the check takes longer. A
    shard that changes meanwhile belongs to a server, which has checked it."""
    if not (folder / "data.mdb").exists():
        return
    before = last_transaction(folder, map_bytes)
    try:
        report = check_shard(folder, map_bytes, within_s)
    except TooLong:
        return
    why = report.problem or report.rolled_back
    if why is not None and last_transaction(folder, map_bytes) == before:
        raise ConfigurationError(
            f"the shard {folder} is damaged: {why}; a server that starts mends or replaces it, and "
            f"so does `cachesvc cache verify --repair` where none runs"
        )


def repair_folder(path: Path) -> list[str]:
    """Repairs every shard, or replaces it by an empty one. Returns what was done.

    Does nothing if a server holds the folder, because the server does this itself. Raises
    ConfigurationError if there is no disk tier.
    """
    done = _repair(path)
    for folder in group_folders(path):
        try:
            done += _repair(folder)
        except ConfigurationError as error:
            done.append(f"left out: {error}")
    return done


def _repair(path: Path) -> list[str]:
    done: list[str] = []
    with (
        suppress(DirectoryLocked),
        _mended(path, _meta(path), lambda count, what: done.append(f"{what} ({count} blocks)")),
    ):
        pass
    return done


def shrink_folder(path: Path) -> int:
    """Gives up what leaves too little of the file system to others, before anything is written
    there. Returns the bytes given back; 0 if there is no disk tier, or a server holds it."""
    meta = read_meta(path)
    if meta is None:
        return 0
    counts = DiskCounts(meta.num_shards, Counter())
    lost = partial(counts.fault, MissReason.TORN)
    with suppress(DirectoryLocked), _mended(path, meta, lost) as slots:
        before = sum(slot.file_bytes() for slot in slots)
        room = DiskRoom(path, slots, counts, meta.setting_bytes, meta.reserve_bytes, Storage())
        room.fit(failed=True)
        return before - sum(slot.file_bytes() for slot in slots)
    return 0


@contextmanager
def _mended(
    path: Path, meta: Meta, on_loss: Callable[[int, str], None]
) -> Iterator[list[ShardSlot]]:
    """The shards of a folder, each checked to the end and mended. Raises DirectoryLocked."""
    with ExitStack() as opened:
        opened.callback(DirectoryLock(path).release)
        slots: list[ShardSlot] = []
        for number in range(meta.num_shards):
            folder = shard_path(path, number)
            shard = partial(Shard, folder, meta.map_bytes, storage=Storage())
            opening = Opening(Storage(), meta.map_bytes, shard, on_loss, check_s=math.inf)
            slots.append(ShardSlot(folder, opening))
            opened.callback(slots[-1].close)
        yield slots


def _meta(path: Path) -> Meta:
    meta = read_meta(path)
    if meta is None:
        raise ConfigurationError(f"there is no disk cache in {path}; check --data-dir")
    return meta


@contextmanager
def open_shards(
    path: Path, *, readonly: bool, groups: bool = False
) -> Iterator[tuple[Meta, list[Shard]]]:
    """Opens a disk tier's shards, beside any server.

    With `groups`, also those of the checkpoints, whose keys are those of blocks. Pinned blocks are
    not evicted. A group that cannot be read is skipped and logged. Raises ConfigurationError
    if there is no disk tier that this version can read.
    """
    with open_disks(path, readonly=readonly, groups=groups) as disks:
        shards = [shard for disk in disks for shard in disk.shards]
        map_bytes = max(disk.meta.map_bytes for disk in disks)
        total = sum(disk.meta.setting_bytes for disk in disks)
        meta = replace(disks[0].meta, num_shards=len(shards), map_bytes=map_bytes)
        yield replace(meta, capacity_bytes=total), shards


class OpenDisk(NamedTuple):
    """One folder of a disk tier, and its shards."""

    path: Path
    meta: Meta
    shards: list[Shard]


@contextmanager
def open_disks(path: Path, *, readonly: bool, groups: bool = False) -> Iterator[list[OpenDisk]]:
    """The same by folder."""
    guard = DiskGuard()
    guard.keep(pinned_keys(path))
    with ExitStack() as stack:
        disks = [stack.enter_context(_open_disk(path, guard, readonly=readonly))]
        for folder in group_folders(path) if groups else ():
            try:
                disks.append(stack.enter_context(_open_disk(folder, guard, readonly=readonly)))
            except ConfigurationError as error:
                logger.warning(f"left out: {error}")
        yield disks


@contextmanager
def _open_disk(path: Path, guard: DiskGuard, *, readonly: bool) -> Iterator[OpenDisk]:
    meta = _meta(path)
    if meta.format != FORMAT:
        raise ConfigurationError(
            f"the disk cache in {path} is of format {meta.format}, and this version reads "
            f"{FORMAT}; use the version that wrote it (a server of this one drops its blocks)"
        )
    shards: list[Shard] = []
    try:
        for number in range(meta.num_shards):
            folder = shard_path(path, number)
            refuse_damaged(folder, meta.map_bytes, READ_CHECK_S if readonly else math.inf)
            shards.append(
                Shard(folder, meta.map_bytes, storage=Storage(), readonly=readonly, guard=guard)
            )
        limit_shards(path, meta.setting_bytes, meta.reserve_bytes, shards)
        yield OpenDisk(path, meta, shards)
    except BrokenPipeError:  # the reader of our output closed the pipe; the shards are sound
        raise
    except (*StorageError, ShardDamaged) as error:
        raise ConfigurationError(f"the disk cache in {path} cannot be read: {error}") from error
    finally:
        for shard in shards:
            shard.close()
