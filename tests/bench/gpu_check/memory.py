"""Memory: an arena of 80 GiB, a pool beyond 2^31 numbers, prompts of 128k tokens."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.attention.base import AttentionCall, AttentionOptions, ReferenceAttention
from engine.batch import Batch, Span
from engine.execution.runner import ModelRunner, pick_attention
from tests.bench.gpu_check.device import (
    BLOCK,
    GREEDY,
    TINY,
    described,
    free_memory,
    random_model,
    shape,
)
from tiers.blocks.frames import FrameArena
from tiers.blocks.layout import BlockLayout
from tiers.memory.device import DevicePool

ARENA_BYTES = 80 << 30
CONTEXT = 128 << 10
CHUNK = 512
_TAIL = 10


def check(device: str, small: bool) -> dict[str, Any]:
    return {
        "arena": _arena(device, 64 << 20 if small else ARENA_BYTES),
        "large_pool": _large_pool(device, 24 if small else (1 << 31) // _BLOCK_ITEMS + 16),
        "long_prompt": _long_prompt(device, small),
    }


def _arena(device: str, num_bytes: int) -> dict[str, Any]:
    """Seconds to make it and what it locks, or as much of it as the machine has to spare."""
    num_bytes = min(num_bytes, int(0.6 * _status("/proc/meminfo", "MemAvailable")))
    layout = BlockLayout.uniform(
        num_layers=32, block_size=BLOCK, num_kv_heads=8, head_dim=128, dtype="bfloat16"
    )
    locked = _locked()
    begun = time.perf_counter()
    arena = FrameArena(layout, num_bytes // layout.nbytes, device)
    made_s = time.perf_counter() - begun
    asked = arena.num_frames * layout.nbytes
    return {
        "what": "arena",
        "asked_bytes": asked,
        "pinned_bytes": arena.num_pinned_bytes,
        "locked_bytes": _locked() - locked,
        "seconds": round(made_s, 2),
        "ok": arena.num_pinned_bytes == (asked if device == "cuda" else 0),
    }


def _locked() -> int:
    """Bytes that the system may not move: locked, or pinned by a driver."""
    return sum(_status("/proc/self/status", name) for name in ("VmLck", "VmPin"))


def _status(file: str, name: str) -> int:
    (line,) = (line for line in Path(file).read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) << 10


_BLOCK_ITEMS = 2 * BLOCK * 8 * 128


def _large_pool(device: str, num_blocks: int) -> dict[str, Any]:
    """A pool whose last blocks lie beyond what 32 bits can number, read and written there."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pool = torch.empty(num_blocks, 1, 2, BLOCK, 8, 128, dtype=dtype, device=device)
    table = [num_blocks - 1, num_blocks - 5, num_blocks - 3]
    generator = torch.Generator().manual_seed(1)
    contents = torch.randn(3, 1, 2, BLOCK, 8, 128, generator=generator).to(dtype)
    pool[table] = contents.to(device)
    small = contents.float()
    errors = {}
    for name, start, count in (("decode", 150, 1), ("short", 140, 20), ("long", 60, 130)):
        query = torch.randn(count, 32, 128, generator=generator).to(dtype)
        key, value = torch.randn(2, count, 8, 128, generator=generator).to(dtype)
        options = AttentionOptions(128**-0.5)
        outputs = []
        for path, blocks, to, kind in (
            (ReferenceAttention(small), [0, 1, 2], "cpu", torch.float32),
            (pick_attention(pool, (), dtype), table, device, dtype),
        ):
            span = Span(1, np.zeros(count, np.int32), start, blocks, True, GREEDY)
            path.begin([span])
            given = (each.to(to, kind) for each in (query, key, value))
            outputs.append(path.attend(AttentionCall(0, *given, options)).float().cpu())
            path.finish()
        errors[name] = float((outputs[0] - outputs[1]).abs().max())
    written = float((pool[table].float().cpu() - small).abs().max())
    return {
        "what": "large pool",
        "items": pool.numel(),
        "largest_error": {**errors, "written": written},
        "ok": max(*errors.values(), written) < 0.03,
    }


def _long_prompt(device: str, small: bool) -> dict[str, Any]:
    """What a chunk and a short tail take beside weights and pool, at the end of a long prompt."""
    context = 1024 if small else CONTEXT
    config = TINY if small else shape(2, 4096, 32, 8, 14336, context)
    loaded = described(random_model(config, device), device)
    num_blocks = context // BLOCK
    pool = DevicePool(loaded.layout(BLOCK), num_blocks, device)
    runner = ModelRunner(loaded, pool.tensor)
    table = list(range(num_blocks))
    extra = {}
    for name, count in (("chunk", CHUNK), ("tail", _TAIL)):
        free_memory(device)
        before = _reset_peak(device)
        tokens = np.arange(count, dtype=np.int32) % 1000
        span = Span(1, tokens, context - count, table, sample=True, params=GREEDY)
        runner.step(Batch([span]))
        runner.forget(1)
        extra[name] = _peak(device) - before
    return {
        "context": context,
        "pool_bytes": pool.tensor.numel() * pool.tensor.element_size(),
        "extra_bytes": extra,
    }


def _reset_peak(device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0
