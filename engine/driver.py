"""Whether this machine can have a GPU at all, asked without importing torch."""

import ctypes
import sys
from importlib import metadata
from typing import Final

from engine.errors import ModelError

NO_GPU: Final = (
    "no CUDA device can be used; run with --device cpu, or install a driver and a build of torch "
    "for CUDA"
)


def check_device(name: str) -> None:
    """Refuses `cuda` where torch is a build for CPUs or no driver is installed.

    Passes what only torch can decide. Raises ModelError.
    """
    if name == "cuda" and not may_have_gpu():
        raise ModelError(NO_GPU)


def may_have_gpu() -> bool:
    """False where torch is a build for CPUs or no driver is installed."""
    return not metadata.version("torch").endswith("+cpu") and _has_driver()


def _has_driver() -> bool:
    """Whether the driver's library is there. It is loaded and not initialised."""
    if sys.platform != "linux" or "rocm" in metadata.version("torch"):
        return True  # torch finds it elsewhere
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
