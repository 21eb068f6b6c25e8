"""Memory: an arena of 80 GiB, and a pool beyond 2^31 numbers."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.attention.base import AttentionCall, AttentionOptions, ReferenceAttention
from engine.batch import Span
from engine.execution.runner import pick_attention
from tests.bench.gpu_check.device import BLOCK, GREEDY
from tiers.blocks.frames import FrameArena
from tiers.blocks.layout import BlockLayout

ARENA_BYTES = 80 << 30


def check(device: str, small: bool) -> dict[str, Any]:
    return {
        "arena": _arena(device, 64 << 20 if small else ARENA_BYTES),
        "large_pool": _large_pool(device, 24 if small else (1 << 31) // _BLOCK_ITEMS + 16),
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
