"""The control groups that hold this process, of version 1 or 2. No torch here."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

OWN, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # version 1 has no word for it, only a number near 2^63


def folders(controller: str, own: Path, root: Path) -> Iterator[Path]:
    """The folder of each of this process's groups that `controller` has, and of those around it.
    Some may not exist: in a container, a group's path may be one of the host's, which cannot be
    seen. Without `own` there is none.

    own: a file that names the groups, as `OWN` does. root: where the system shows them, as `ROOT`.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path or (controllers and controller not in controllers.split(",")):
            continue
        tree = root / controller if controllers else root
        folder = tree / path.lstrip("/")
        while folder.is_relative_to(tree):
            yield folder
            folder = folder.parent


def memory_limit() -> int | None:
    """The lowest limit in bytes of all groups, of version 1 or 2, that hold this process. None if
    there is none."""
    found = map(_memory_limit, folders("memory", OWN, ROOT))
    return min((limit for limit in found if limit is not None), default=None)


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError):
            text = (folder / name).read_text().strip()
            return int(text) if text.isdecimal() and int(text) < UNLIMITED else None
    return None
