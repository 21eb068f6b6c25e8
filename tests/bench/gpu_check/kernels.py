"""Where the time of a step goes: its kernels, by the time that they take together.

Of an 8B shape in bfloat16: a chunk of a prompt at its beginning and after 14k tokens, a decode step
of eight sequences, a question of ten tokens about 16k, and the same beside eight sequences that
decode. The last three are graphs, and are launched kernel by kernel too.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.profiler import ProfilerActivity, profile

from engine.batch import Batch, Span
from engine.execution.runner import ModelRunner
from tests.bench.gpu_check.device import (
    BLOCK,
    GREEDY,
    TINY,
    described,
    now,
    random_model,
    shape,
    timed,
)
from tiers.memory.device import DevicePool

STEPS = 5  # that are profiled
LISTED = 24  # kinds of kernel


def check(device: str, small: bool) -> dict[str, Any]:
    chunk, long, depth = (32, 256, 128) if small else (2048, 16 << 10, 2048)
    config = TINY if small else shape(32, 4096, 32, 8, 14336, 2 * long)
    loaded = described(random_model(config, device), device)
    blocks = -(-(depth + 1) // BLOCK)
    pool = DevicePool(loaded.layout(BLOCK), max(8 * blocks, long // BLOCK + 1), device)
    runner = ModelRunner(loaded, pool.tensor, scratch=pool.scratch)
    runner.warm_up()
    whole = list(range(long // BLOCK + 1))
    apart = [list(range(n * blocks, (n + 1) * blocks)) for n in range(8)]
    steps = {
        "chunk_first": [_span(0, chunk, 0, whole)],
        "chunk_last": [_span(0, chunk, long - chunk, whole)],
        "decode_8": [_span(n, 1, depth, table) for n, table in enumerate(apart)],
        "question": [_span(0, 10, long - 20, whole)],
        "question_beside_8": [
            *(_span(n, 1, depth, table) for n, table in enumerate(apart)),
            _span(99, 10, long - 20, whole),
        ],
    }
    launched = ModelRunner(loaded, pool.tensor)
    launched.warm_up()
    figures = {}
    for name, spans in steps.items():
        figures[name] = _of(device, lambda some=spans: runner.step(Batch(some)))
        apart_ms = timed(device, lambda some=spans: launched.step(Batch(some))) * 1e3
        figures[name]["launched_ms"] = round(apart_ms, 3)
    return figures


def _span(number: int, count: int, start: int, table: list[int]) -> Span:
    tokens = (np.arange(count, dtype=np.int32) * 31 + number) % 40_000
    return Span(number, tokens, start, table, sample=True, params=GREEDY)


def _of(device: str, step: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of a step, of its kernels, and of each kind, with how many calls a step has."""
    whole = timed(device, step)
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        for _ in range(STEPS):
            step()
        now(device)
    kinds = [
        (event.self_device_time_total or event.self_cpu_time_total, event.count, event.key)
        for event in profiled.key_averages()
    ]
    kinds.sort(reverse=True)
    return {
        "step_ms": round(whole * 1e3, 3),
        "kernels_ms": round(sum(us for us, _, _ in kinds) / STEPS / 1e3, 3),
        "calls": round(sum(count for _, count, _ in kinds) / STEPS),
        "kinds": [
            {"ms": round(us / STEPS / 1e3, 3), "calls": round(count / STEPS, 1), "name": key[:100]}
            for us, count, key in kinds[:LISTED]
        ],
    }
