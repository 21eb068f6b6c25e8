"""The folder of a disk tier: its lock and its format.

    disk.json     format version, shards, map size, blocks
    server.lock   held with flock by the one server; names it
    shard-000/    one LMDB environment, and so on

The lock ends with its process, so `kill -9` leaves nothing to clean up. Readers and maintenance
commands do not need it, because LMDB arbitrates between processes.
"""

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from tiers.blocks.keys import PrefixKey
from tiers.errors import ConfigurationError, DirectoryLocked

FORMAT = 3
META_NAME = "disk.json"
LOCK_NAME = "server.lock"
ELSEWHERE_NAME = "elsewhere.json"
GROUPS_NAME = "groups.json"
LOOK_S = 5.0  # how long a start waits for commands that only check the lock


@dataclass(frozen=True, slots=True)
class Meta:
    """The contents of `disk.json`."""

    format: int
    num_shards: int
    map_bytes: int  # of each shard
    num_blocks: int = 0  # when it was last opened, synced or closed
    block_size: int = 0  # tokens, as last opened
    capacity_bytes: int = 0  # of all shards, as last set
    reserve_bytes: int | None = None  # left to others on the file system; see `disk.room`

    @property
    def setting_bytes(self) -> int:
        return self.capacity_bytes or self.num_shards * self.map_bytes


class DirectoryLock:
    """Holds `server.lock` until `release`."""

    def __init__(self, root: Path) -> None:
        """Takes the lock. Raises DirectoryLocked, naming the process, if another one serves this
        folder, and ConfigurationError if its file system has no locks."""
        with ExitStack() as opened:
            self._file = opened.enter_context((root / LOCK_NAME).open("a+"))
            if not _take(self._file):
                raise DirectoryLocked(
                    f"{root} is served by {read_holder(root)}; stop that server or choose another "
                    "--data-dir"
                )
            opened.pop_all()
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with suppress(OSError):  # on a full disk it holds the lock without a name
            os.ftruncate(self._file.fileno(), 0)
            name = f"pid {os.getpid()} on {socket.gethostname()} since {started}\n"
            os.write(self._file.fileno(), name.encode())

    def release(self) -> None:
        with suppress(OSError):  # a failed disk keeps our name; without the lock it means nothing
            self._file.truncate(0)
        self._file.close()


def _take(file: IO[str]) -> bool:
    """Tries to take the lock. A command that checks it (`is_locked`) shares it for a moment. We
    wait for that, so that it does not fail a server's start."""
    deadline = time.monotonic() + LOOK_S
    while not _locks(file, fcntl.LOCK_EX):
        if not _locks(file, fcntl.LOCK_SH) or time.monotonic() > deadline:
            return False
        fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(0.001)
    return True


def _locks(file: IO[str], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigurationError(
            f"{file.name} cannot be locked ({error.strerror}): its file system has no locks, as "
            "some network mounts have none; choose a folder on a local disk"
        ) from error
    return True


def read_holder(root: Path) -> str:
    """A description of the folder's holder; meaningful only while it is locked."""
    try:
        return (root / LOCK_NAME).read_text().strip() or "another process"
    except OSError:
        return "another process"


def is_locked(root: Path) -> bool:
    """Whether a server holds this folder now."""
    try:
        with (root / LOCK_NAME).open() as file:
            return not _locks(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def make_root(root: Path) -> None:
    """Creates the folder. Raises ConfigurationError if it cannot be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"the disk cache cannot write to {root}: {error.strerror}; "
            f"choose another --data-dir or --disk-cache-dir, or turn the disk cache off"
        ) from error


def read_meta(root: Path) -> Meta | None:
    """The folder's description; None if it is missing or unreadable."""
    try:
        stands = json.loads((root / META_NAME).read_text())
        return Meta(**{name: stands[name] for name in Meta.__slots__ if name in stands})
    except (OSError, ValueError, TypeError):
        return None


def write_meta(root: Path, meta: Meta) -> None:
    replace_json(root / META_NAME, asdict(meta))


def replace_json(path: Path, document: Mapping[str, object]) -> None:
    """Replaces a file durably. After a crash either the old or the new one is there."""
    temporary = path.with_name(f"{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def note_blocks(root: Path, num_blocks: int) -> None:
    """Records how many blocks the folder has."""
    meta = read_meta(root)
    if meta is not None:
        write_meta(root, replace(meta, num_blocks=num_blocks))


def shard_of(key: PrefixKey, num_shards: int) -> int:
    return int.from_bytes(key[:4], "little") % num_shards


def note_elsewhere(root: Path, shared: str | None, groups: Sequence[Path] = ()) -> None:
    """Records other places of this tier's blocks, for a purge without its server. `groups` are the
    folders of what is kept beside blocks under the same keys, such as checkpoints."""
    places = [shared] if shared else []
    for name, lines in ((ELSEWHERE_NAME, places), (GROUPS_NAME, [*map(str, groups)])):
        if lines:
            (root / name).write_text(json.dumps(lines))
        else:
            (root / name).unlink(missing_ok=True)


def read_elsewhere(root: Path) -> list[str]:
    """The stores that have blocks of this tier too."""
    return _read_list(root / ELSEWHERE_NAME)


def group_folders(root: Path) -> list[Path]:
    """The folders of other groups of parts of the same prefixes."""
    return [Path(place) for place in _read_list(root / GROUPS_NAME)]


def _read_list(path: Path) -> list[str]:
    try:
        return [str(each) for each in json.loads(path.read_text())]
    except FileNotFoundError:
        return []


def shard_path(root: Path, number: int) -> Path:
    return root / f"shard-{number:03d}"


def remove_shards(root: Path) -> None:
    for path in root.glob("shard-*"):
        shutil.rmtree(path, ignore_errors=True)
