"""The quick first steps of a server: its data directory, its memory, its address, its socket.

Imports no torch, so that errors are reported within half a second.
"""

import errno
import ipaddress
import logging
import os
import shutil
import socket
import tempfile
from pathlib import Path

from api.format import size
from cachesvc.config.errors import ConfigError
from cachesvc.config.places import NETWORK_FILE_SYSTEMS, disk_path, file_system, states_path
from cachesvc.config.sections import CacheSection, ServerSection
from cachesvc.server.memory import total_bytes
from tiers.disk.directory import is_locked, read_holder
from tiers.errors import DirectoryLocked, TierError

logger = logging.getLogger(__name__)

ROOM_BYTES = 1 << 20  # that must be free at a start
LEAST_FREE_BYTES = 64 << 20  # below which blocks leave first: the ledger's log takes half
BACKLOG = 2048  # connections waiting to be accepted; uvicorn's default


def make_data_dir(path: Path) -> None:
    """Creates the data directory for its owner only: it holds prompts' KV and the ledger.

    Raises ConfigError if it cannot be created or written, DirectoryLocked if another server runs on
    it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{path} is a file; --data-dir names a folder") from None
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}; check --data-dir") from None
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise ConfigError(
            f"{path} is on a file system that is mounted read-only; mount it for writing, or "
            "choose another --data-dir"
        )
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"this user cannot write {path}; change its owner to the user that serves "
            f"(`chown`), or choose another --data-dir"
        )
    if is_locked(disk_path(path)):
        raise DirectoryLocked(
            f"{path} is served by {read_holder(disk_path(path))}; stop that server or choose "
            f"another --data-dir"
        )
    _give_cache_back(path)
    _check_room(path)
    if (kind := file_system(path)) in NETWORK_FILE_SYSTEMS:
        logger.warning(
            f"{path} is on {kind}: a command on another machine would damage the ledger and the "
            f"disk cache, which are mapped and locked on this one; use a local disk"
        )


def _give_cache_back(path: Path) -> None:
    """Where the ledger might find no room, blocks leave, because they can be computed again."""
    free = shutil.disk_usage(path).free
    if free >= LEAST_FREE_BYTES:
        return
    from tiers.disk.inspection.opening import shrink_folder  # lmdb, for a rare case
    from tiers.disk.storage import StorageError

    folders = [disk_path(path), states_path(path)]
    try:
        returned = sum(shrink_folder(folder) for folder in folders if folder.exists())
    except (*StorageError, TierError) as error:
        logger.error(f"the disk cache in {path} gave no room back: {error}")
        return
    if returned > 0:
        logger.warning(
            f"{path} had {size(free)} free, so its disk cache gave {size(returned)} back to the "
            f"file system, where {size(shutil.disk_usage(path).free)} are free now"
        )


def _check_room(path: Path) -> None:
    """Raises ConfigError if a full disk or a quota would keep the ledger from being written."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        raise ConfigError(
            f"the disk of {path} is full, and its disk cache has nothing more to give: there is no "
            f"room for {ROOM_BYTES >> 20} MiB, and every request writes to the ledger; free some "
            "space, or choose another --data-dir"
        ) from None


def check_memory(cache: CacheSection, *, on_gpu: bool) -> None:
    """Raises ConfigError for a tier that is larger than this machine's memory."""
    total = total_bytes()
    sizes = {"--host-cache": cache.host_bytes}
    if not on_gpu:
        sizes["--device-cache"] = cache.device_bytes
    for option, num_bytes in sizes.items():
        if total is not None and num_bytes > total:
            raise ConfigError(
                f"{option} is {size(num_bytes)}, and this machine has {size(total)} of memory: "
                "lower it"
            )


def check_address(server: ServerSection, *, requires_keys: bool) -> None:
    """Raises ConfigError if a server without keys would be reachable from other machines."""
    if requires_keys or is_loopback(server.host):
        return
    raise ConfigError(
        f"without API keys the server listens on loopback only, and {server.host} is not loopback; "
        "create a key with `cachesvc keys create`, or add --require-keys, or use --host 127.0.0.1"
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A socket that has this address and refuses connections until `listen`.

    Raises ConfigError for a port in use or an invalid host.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen on {host!r}: {error.strerror}; check --host") from None
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _port_in_use(host, port, error) from None
    return listener


def listen(listener: socket.socket) -> None:
    """Takes connections, which wait until a server accepts them. Raises ConfigError if another
    server that was starting meanwhile has the port."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _port_in_use(host, port, error) from None


def _port_in_use(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host}:{port}: {error.strerror}; "
        f"another server may be running there: choose another --port, or 0 for a free one"
    )


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
