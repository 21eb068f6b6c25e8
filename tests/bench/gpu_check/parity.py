"""Tokens: greedy answers of tiny models, cold, from pinned memory, by graphs and by launches."""

import time
from array import array
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM

from engine.batch import Batch, Span
from engine.execution.runner import ModelRunner
from engine.models.load import LoadedModel, describe
from tests.bench.gpu_check.device import GREEDY
from tests.support.models import ARCHITECTURES, tiny_model
from tiers.blocks.frames import FrameArena
from tiers.memory.device import DevicePool


def check(device: str, small: bool) -> list[dict[str, Any]]:
    return [_of(name, device) for name in ARCHITECTURES]


def _of(name: str, device: str) -> dict[str, Any]:
    """Greedy tokens on the device: cold, and from blocks that went to pinned memory and back."""
    loaded = moved(tiny_model(name), device)
    layout = loaded.layout(16)
    pool, arena = DevicePool(layout, 32, device), FrameArena(layout, 16, device)
    taken = [pool.take() for _ in range(24)]  # whole slots: those of a pool with windows may be cut
    slots = [slot for slot in taken if slot is not None]
    runner = ModelRunner(loaded, pool.tensor, scratch=pool.scratch)
    prompt = np.array([(7 * i * i + 3) % loaded.vocab_size for i in range(70)], np.int32)
    cold = generate(runner, 1, prompt, 0, slots[:8], 8)
    frames = [arena.take() for _ in range(4)]
    held = [frame for frame in frames if frame is not None]
    outs = [pool.copy_out(slot, frame) for slot, frame in zip(slots, held, strict=False)]
    while not all(copy.done() for copy in outs):
        time.sleep(0.001)
    pool.copy_in(held, slots[16:20])
    hit = generate(runner, 2, prompt, 64, slots[16:], 8)
    launched = ModelRunner(loaded, pool.tensor)
    eager = generate(launched, 3, prompt, 0, slots[8:16], 8)
    same = {"from_host": hit == cold, "without_graphs": eager == cold}
    return {"what": name, "ok": all(same.values()), **same, "tokens": cold}


def generate(
    runner: ModelRunner, number: int, prompt: Any, start: int, table: list[int], count: int
) -> list[int]:
    tokens = array("i", prompt.tolist())
    while len(tokens) < len(prompt) + count:
        span = np.frombuffer(tokens[start:], np.int32)
        (result,) = runner.step(
            Batch([Span(number, span, start, table, sample=True, params=GREEDY)])
        )
        assert result.token is not None
        start = len(tokens)
        tokens.append(result.token)
    runner.forget(number)
    return list(tokens[len(prompt) :])


def moved(loaded: LoadedModel, device: str) -> LoadedModel:
    """A tiny model described anew for the device; packed for a CPU it is used as it is."""
    if device == "cpu":
        return loaded
    model: Any = AutoModelForCausalLM.from_config(loaded.model.config, dtype=loaded.model.dtype)
    return describe(
        loaded.name,
        model.to(device).eval().requires_grad_(False),
        loaded.tokenizer,
        weights_digest=loaded.weights_digest,
        dtype=loaded.dtype,
        device=device,
    )
