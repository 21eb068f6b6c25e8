"""The device under test: its clock, its name, and random models on it."""

import gc
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.request import SamplingParams
from tests.bench.report import commit

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
BLOCK = 64


def shape(
    layers: int, hidden: int, heads: int, kv_heads: int, inner: int, context: int = 8192
) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=49152,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )


TINY = shape(2, 64, 4, 2, 128)


def random_model(config: LlamaConfig, device: str) -> Any:
    """transformers' model of that shape, random; bfloat16 on a GPU, float32 on a CPU."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        # A copy: describing a model writes our attention into its configuration.
        model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype)
    return model.eval().requires_grad_(False)


def timed(device: str, work: Callable[[], object], rounds: int = 5) -> float:
    """Median seconds of `work`, the device idle before and after."""
    work()
    seconds = []
    for _ in range(rounds):
        started = now(device)
        work()
        seconds.append(now(device) - started)
    return statistics.median(seconds)


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def free_memory(device: str) -> None:
    """What nobody refers to any more goes back to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "commit": commit()}
