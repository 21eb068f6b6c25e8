"""Bytes that move: at the bus's rate, and unchanged while steps are computed beside them.

A pinned copy runs at the bus's rate whatever asks for it: promotion and demotion should reach 90 %
of one plain `copy_` of the same bytes.
"""

import time
from typing import Any

import numpy as np
import torch
import xxhash

from engine.batch import Batch, Span
from engine.execution.runner import ModelRunner
from tests.bench.gpu_check.device import BLOCK, GREEDY, timed
from tests.bench.gpu_check.parity import moved
from tests.support.models import tiny_model
from tiers.blocks import frames
from tiers.blocks.frames import Frame, FrameArena
from tiers.blocks.layout import BlockLayout
from tiers.memory.device import DevicePool

LEAST_SHARE = 0.9  # of a plain copy's rate in the same run


def check(device: str, small: bool) -> dict[str, Any]:
    return {
        "borders": _borders(device),
        "rates": _rates(device, num_blocks=8 if small else 256),
        "hashes": _hashes(device, num_blocks=8 if small else 64, rounds=2 if small else 20),
    }


def _rates(device: str, num_blocks: int) -> dict[str, Any]:
    """Promotion and demotion, block by block, as a share of one plain pinned `copy_`."""
    layout = BlockLayout.uniform(
        num_layers=32, block_size=BLOCK, num_kv_heads=8, head_dim=128, dtype="bfloat16"
    )
    pool, arena = DevicePool(layout, num_blocks, device), FrameArena(layout, num_blocks, device)
    taken = [frame for _ in range(num_blocks) if (frame := arena.take()) is not None]
    slots = list(range(num_blocks))
    pinned = torch.cuda.is_available()
    plain = torch.empty(pool.tensor.shape, dtype=layout.torch_dtype, pin_memory=pinned)
    times = {
        "plain_up": timed(device, lambda: pool.tensor.copy_(plain, non_blocking=True)),
        "plain_down": timed(device, lambda: plain.copy_(pool.tensor, non_blocking=True)),
        "promote": timed(device, lambda: pool.copy_in(taken, slots)),
        "demote": timed(
            device, lambda: [pool.copy_out(s, f) for s, f in zip(slots, taken, strict=True)]
        ),
    }
    nbytes = num_blocks * layout.nbytes
    return {
        "block_bytes": layout.nbytes,
        "gb_per_s": {name: nbytes / seconds / 1e9 for name, seconds in times.items()},
        "promote_share": (up := times["plain_up"] / times["promote"]),
        "demote_share": (down := times["plain_down"] / times["demote"]),
        "what": f"promotion and demotion at {LEAST_SHARE} of a plain copy's rate",
        "ok": device != "cuda" or min(up, down) >= LEAST_SHARE,
    }


def _borders(device: str) -> dict[str, Any]:
    """Every frame of an arena registered in many pieces, of blocks that are no whole pages."""
    layout = BlockLayout.uniform(
        num_layers=3, block_size=16, num_kv_heads=1, head_dim=40, dtype="float16"
    )
    before, frames.PIN_BYTES = frames.PIN_BYTES, 1 << 16
    try:
        arena = FrameArena(layout, 200, device)
        pool = DevicePool(layout, 200, device)
        wrong = 0
        random = np.random.default_rng(5)
        for slot in range(200):
            frame = arena.take()
            expected = random.bytes(layout.nbytes)
            frame.buffer[:] = expected
            _wait([pool.copy_in([frame], [slot])])
            frame.buffer[:] = bytes(layout.nbytes)
            _wait([pool.copy_out(slot, frame)])
            wrong += bytes(frame.buffer) != expected
    finally:
        frames.PIN_BYTES = before
    return {"what": "copies at the borders of registrations", "ok": wrong == 0, "wrong": wrong}


def _hashes(device: str, num_blocks: int, rounds: int) -> dict[str, Any]:
    """Random blocks up and down again, decode steps between; every byte by its hash.

    The steps are computed over the pool that the copies change: graphs where the device has them.
    """
    loaded = moved(tiny_model("qwen3"), device)
    layout = loaded.layout(16)
    pool = DevicePool(layout, 8 + num_blocks, device)
    arena = FrameArena(layout, 2 * num_blocks, device)
    runner = ModelRunner(loaded, pool.tensor, scratch=pool.scratch)
    runner.warm_up()
    taken = [frame for _ in range(2 * num_blocks) if (frame := arena.take()) is not None]
    there, back = taken[:num_blocks], taken[num_blocks:]
    slots = list(range(8, 8 + num_blocks))
    random = np.random.default_rng(3)
    wrong, steps = 0, 0
    tokens = []
    for _ in range(rounds):
        for frame in there:
            frame.buffer[:] = random.bytes(layout.nbytes)
        expected = [xxhash.xxh3_128_digest(frame.buffer) for frame in there]
        steps = _decode(runner, steps, tokens)
        up = pool.copy_in(there, slots)
        steps = _decode(runner, steps, tokens)
        for slot in slots:
            pool.settle(slot)
        downs = [pool.copy_out(slot, frame) for slot, frame in zip(slots, back, strict=True)]
        steps = _decode(runner, steps, tokens)
        _wait([up, *downs])
        wrong += sum(_digest(f) != e for f, e in zip(back, expected, strict=True))
    moved_bytes = 2 * rounds * num_blocks * layout.nbytes
    return {"what": "hashes", "ok": wrong == 0, "wrong_blocks": wrong, "bytes": moved_bytes}


def _digest(frame: Frame) -> bytes:
    return xxhash.xxh3_128_digest(frame.buffer)


def _decode(runner: ModelRunner, start: int, tokens: list[int], count: int = 4) -> int:
    """A few tokens of one sequence in blocks 0 to 7, begun anew when they are full."""
    for position in range(start, start + count):
        place = position % (8 * 16)
        span = Span(1, np.array([65], np.int32), place, list(range(8)), True, GREEDY)
        (sampled,) = runner.step(Batch([span]))
        tokens.append(sampled.token or 0)
    return start + count


def _wait(copies: list[Any]) -> None:
    while not all(copy.done() for copy in copies):
        time.sleep(0.001)
