"""Tokens: greedy answers of tiny models, cold, from pinned memory, by graphs and by launches."""

import time
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM

from engine.execution.runner import ModelRunner
from engine.models.load import LoadedModel
from tests.support.models import ARCHITECTURES, described, generated, tiny_model
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
    cold = generated(runner, [prompt], 8, tables=[slots[:8]])
    frames = [arena.take() for _ in range(4)]
    held = [frame for frame in frames if frame is not None]
    outs = [pool.copy_out(slot, frame) for slot, frame in zip(slots, held, strict=False)]
    while not all(copy.done() for copy in outs):
        time.sleep(0.001)
    pool.copy_in(held, slots[16:20])
    hit = generated(runner, [prompt], 8, tables=[slots[16:]], computed=64, number=2)
    launched = ModelRunner(loaded, pool.tensor)
    eager = generated(launched, [prompt], 8, tables=[slots[8:16]])
    same = {"from_host": hit == cold, "without_graphs": eager == cold}
    return {"what": name, "ok": all(same.values()), **same, "tokens": cold[0]}


def moved(loaded: LoadedModel, device: str) -> LoadedModel:
    """A tiny model described anew for the device; packed for a CPU it is used as it is."""
    if device == "cpu":
        return loaded
    model: Any = AutoModelForCausalLM.from_config(loaded.model.config, dtype=loaded.model.dtype)
    return described(loaded.name, model.to(device), device=device)
