"""Paths of a server's files: the data directory and what it contains."""

import os
from pathlib import Path

ENV_PREFIX = "CACHESVC_"
ENV_DATA_DIR = f"{ENV_PREFIX}SERVER__DATA_DIR"
ENV_DATABASE_URL = f"{ENV_PREFIX}BILLING__DATABASE_URL"
MOUNTS = Path("/proc/self/mounts")
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph"})


def data_home() -> Path:
    home = os.environ.get("XDG_DATA_HOME")
    return Path(home) if home else Path.home() / ".local" / "share"


def default_data_dir() -> Path:
    chosen = os.environ.get(ENV_DATA_DIR)
    return Path(chosen).expanduser() if chosen else data_home() / "cachesvc"


def default_database_url() -> str | None:
    """The ledger of the environment, where a server has it too. None is SQLite in its directory."""
    return os.environ.get(ENV_DATABASE_URL) or None


def has_other_variables() -> bool:
    """Whether the environment has settings other than these two, or misspelt ones."""
    known = (ENV_DATA_DIR, ENV_DATABASE_URL)
    return any(name.startswith(ENV_PREFIX) and name not in known for name in os.environ)


def disk_path(data_dir: Path) -> Path:
    return data_dir / "disk"


def states_path(data_dir: Path) -> Path:
    """The folder of the checkpoints of recurrent states on disk."""
    return data_dir / "checkpoints"


def found_disk(data_dir: Path) -> Path:
    """The disk tier for commands: the server's own, or else a node's.

    A node has a folder for each block layout, in its own folder or in that of the server that
    started it. This returns the one opened last. A command can also name any of them.
    """
    own = disk_path(data_dir)
    for folder in (data_dir, own):
        if (folder / "disk.json").exists():
            return folder
    of_nodes = [*data_dir.glob("*/disk.json"), *(own / "node").glob("*/disk.json")]
    return max(of_nodes, key=lambda file: file.stat().st_mtime).parent if of_nodes else own


def models_path(data_dir: Path) -> Path:
    return data_dir / "models"


def notify_socket() -> str | None:
    """The address of systemd's notify socket, if set; `@` begins an abstract address."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    return address.replace("@", "\0", 1) if address.startswith("@") else address or None


def file_system(path: Path) -> str | None:
    """The type of the file system that holds `path`; None if the system does not report it."""
    try:
        lines = [line.split()[1:3] for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return None
    whole = str(path.resolve())
    inside = [
        (len(place), kind)
        for place, kind in lines
        if whole == place or whole.startswith(place.rstrip("/") + "/")
    ]
    return max(inside)[1] if inside else None
