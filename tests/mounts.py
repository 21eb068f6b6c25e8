"""File systems of their own, for tests that fill them or let them fail."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.patience import ended

_MNT_DETACH = 2


@contextmanager
def mounted(folder: Path, kind: str, num_bytes: int, options: str = "rw") -> Iterator[Path]:
    """An empty ext4 or tmpfs of this size. Skips the test without root or a loop device."""
    place, image = folder / kind, folder / f"{kind}.image"
    place.mkdir()
    if os.geteuid() or (kind == "ext4" and not shutil.which("mkfs.ext4")):
        pytest.skip("needs root and mkfs.ext4, to mount a file system of its own")
    options, device = f"size={num_bytes},{options}", "tmpfs"
    if kind == "ext4":
        with image.open("wb") as file:
            file.truncate(num_bytes)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        options, device = options.replace(f"size={num_bytes}", "loop"), str(image)
    made = ended("mount", "-t", kind, "-o", options, device, place)
    if made.returncode:
        pytest.skip(f"nothing can be mounted here: {made.stderr}")
    try:
        yield place
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(place), _MNT_DETACH)
        image.unlink(missing_ok=True)
