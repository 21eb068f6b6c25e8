"""This machine's hardware for computing. Read at start-up, on any thread."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.driver import NO_GPU
from engine.errors import ModelError

CPU_CACHE_BYTES = 1 << 30  # of the device tier, if not configured
CPU_COPIES_BYTES = 2 << 30  # of working copies of sequences' KV
STEP_BYTES = 2 << 30  # of a GPU, reserved for the memory that steps need
CPU_STEP_TOKENS = 512  # of prompts in a step
GPU_STEP_TOKENS = 2048  # so that the arithmetic of a step outlasts its launches (DESIGN)


def default_dtype(device: str) -> str:
    """The compute dtype for `auto`: float32 on a CPU, half precision on a GPU.

    bfloat16, or float16 where the GPU does not multiply bfloat16 (before Ampere): there every
    bfloat16 operation is converted, and Triton compiles none.
    """
    if torch.device(device).type != "cuda":
        return "float32"
    major, _ = torch.cuda.get_device_capability(device)
    return "bfloat16" if major >= 8 else "float16"


def pick_device(name: str) -> str:
    """Resolve `auto`, `cpu` or `cuda` to a device. Raises ModelError if there is no GPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError(NO_GPU)
    return name


def attend_without_plans(device: str) -> None:
    """Leave cuDNN out of torch's choice of an attention kernel, in this process.

    On Hopper and later torch prefers it, and it makes a plan for each number of queries and keys:
    0.4 s for each length of a prompt that was not seen before (modelscope/FunASR issue 3704, and
    docs/measurements/gpu.md).
    """
    if torch.device(device).type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def default_step_tokens(device: str) -> int:
    """How many tokens of prompts a step computes, if not configured. What does not fit into a GPU's
    memory is computed in parts (`execution.shrinking`)."""
    return GPU_STEP_TOKENS if torch.device(device).type == "cuda" else CPU_STEP_TOKENS


def spare_bytes(device: str) -> int:
    """The default size of the device tier in bytes. Call it once the model is loaded.

    On a GPU: nine tenths of its free memory, with at least 2 GiB left for steps. They need graphs,
    logits, and a gathered prefix of 128k tokens (2 GB for 8 heads of 128 in bfloat16). On a CPU: 1
    GiB, since other processes share the memory. Raises ModelError if the model leaves a GPU no
    room.
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


def upload(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array as a tensor on the device, without waiting for the device.

    For a GPU it goes through pinned memory, which torch keeps until the copy is done. A copy from
    ordinary memory would wait for all work queued before it.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
