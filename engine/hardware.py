"""What this machine computes with. Read at start-up and by `cachesvc doctor`, on any thread."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import ModelError

CPU_CACHE_BYTES = 1 << 30  # of the device tier, where nobody said how many
STEP_BYTES = 2 << 30  # of a GPU, for what steps compute with
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hardware:
    """`gpu` is its name, None where there is none; `threads` are those of CPU arithmetic."""

    threads: int
    gpu: str | None = None
    gpu_bytes: int = 0


def read_hardware() -> Hardware:
    threads = torch.get_num_threads()
    if not torch.cuda.is_available():
        return Hardware(threads)
    gpu = torch.cuda.get_device_properties(0)
    return Hardware(threads, gpu.name, gpu.total_memory)


def pick_device(name: str) -> str:
    """The device that `auto`, `cpu` or `cuda` means here. Raises ModelError for a missing GPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "no CUDA device can be used; run with --device cpu, or install a driver and a build "
            "of torch for CUDA"
        )
    return name


def spare_bytes(device: str) -> int:
    """Bytes for the device tier where nobody said how many, asked once the model is loaded.

    Nine tenths of what a GPU has free, but 2 GiB at least stay for what steps compute with: graphs,
    logits, and a gathered prefix of 128k tokens where torch reads none in place (2 GB for 8 heads
    of 128, in bfloat16). On a CPU 1 GiB, since memory is shared with everybody. Raises ModelError
    where the model leaves a GPU nothing.
    """
    if device != "cuda":
        return CPU_CACHE_BYTES
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    spare = free - max(STEP_BYTES, free // 10)
    if spare <= 0:
        raise ModelError(
            f"the model leaves {free >> 20} of {total >> 20} MiB of the GPU free, and steps need "
            f"{STEP_BYTES >> 20}; serve a smaller model, end what else uses the GPU, or give "
            f"--device-cache a size"
        )
    return spare


def run_apart(work: Callable[[], T]) -> T:
    """Run `work` on a thread that ends with it, and so does the team of arithmetic threads that it
    made.

    Where several threads have a team each, libgomp counts more threads than processors, and each
    region of each team ends in sleep, not spinning (docs/measurements, "Threads"). So only the
    engine's thread keeps a team.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="cachesvc-load") as thread:
        return thread.submit(work).result()


def upload(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array as a tensor on the device, without waiting for the device.

    To a GPU through pinned memory, which torch keeps until the copy is done: a copy from ordinary
    memory would wait for all work queued before it.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
