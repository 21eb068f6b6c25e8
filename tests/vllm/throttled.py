"""A disk that reads slowly: a control group of the kernel's, as an operator would make."""

import os
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

GROUPS = Path("/sys/fs/cgroup")


class Throttle:
    """Bounds what the processes in its group read from the device of a folder."""

    def __init__(self, group: Path, folder: Path) -> None:
        self._group = group
        number = folder.stat().st_dev
        self._device = f"{os.major(number)}:{os.minor(number)}"

    def set(self, bytes_per_s: int) -> None:
        """0 lifts the bound."""
        first = self._group / "blkio.throttle.read_bps_device"
        if first.exists():
            first.write_text(f"{self._device} {bytes_per_s}")
        else:
            (self._group / "io.max").write_text(f"{self._device} rbps={bytes_per_s or 'max'}")

    def add(self, pid: int) -> None:
        (self._group / "cgroup.procs").write_text(str(pid))


@contextmanager
def throttle(folder: Path):
    """A group of its own. Skips the test where none can be made."""
    root = GROUPS / "blkio" if (GROUPS / "blkio").is_dir() else GROUPS
    group = root / f"cachesvc-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        made = Throttle(group, folder)
        try:
            made.set(0)
        except OSError as error:
            pytest.skip(f"its reads cannot be bounded: {error}")
        yield made
    finally:
        with suppress(OSError):  # a process may be in it still
            group.rmdir()


def forget_pages(folder: Path) -> None:
    """Write a folder's files out, and drop them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
