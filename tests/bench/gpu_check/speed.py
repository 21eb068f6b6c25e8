"""Prefill, decode and sampling.

A decode step of an 8B-shaped bfloat16 model reads 16 GB of weights once, 3.3 ms at 4.8 TB/s. Of 33
sequences, one of 32k tokens reads 4 GB of KV more, 0.9 ms; filling the batch up to 64 should cost
nothing that can be seen.
"""

import contextlib
import time
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig

from engine.batch import Batch, Span
from engine.execution.runner import ModelRunner
from engine.execution.sampler import Sampler
from engine.request import SamplingParams
from tests.bench.gpu_check.device import (
    BLOCK,
    GREEDY,
    TINY,
    described,
    free_memory,
    now,
    random_model,
    shape,
    timed,
)
from tiers.memory.device import DevicePool

MOST_SLOWED = 1.5  # by one sequence of 32k tokens among 33


def check(device: str, small: bool) -> dict[str, Any]:
    shapes = {"tiny": TINY}
    if not small:
        shapes = {"135m": shape(30, 576, 9, 3, 1536), "8b": shape(32, 4096, 32, 8, 14336)}
    lengths = 128 if small else 2048
    models = [_of(name, config, device, lengths) for name, config in shapes.items()]
    free_memory(device)
    return {
        "models": models,
        "uneven_batch": _uneven_batch(device, small),
        "sampling": _sampling(device, vocab_size=1000 if small else 151_936),
    }


def _of(name: str, config: LlamaConfig, device: str, num_tokens: int) -> dict[str, Any]:
    """Prefill and decode tokens a second, beside transformers' `generate_batch` in the same run."""
    model = random_model(config, device)
    batch, steps = 8, 32
    prompts = [
        np.array([(31 * i + 17 * n) % config.vocab_size for i in range(num_tokens)], np.int32)
        for n in range(batch)
    ]
    peer = generate_batch(model, prompts, steps)
    free_memory(device)  # the peer's pool of blocks is most of the device
    loaded = described(model, device, name)
    per_prompt = -(-(num_tokens + steps) // BLOCK)
    pool = DevicePool(loaded.layout(BLOCK), batch * per_prompt, device)
    tables = [list(range(n * per_prompt, (n + 1) * per_prompt)) for n in range(batch)]
    ours = {
        kind: serve(
            ModelRunner(loaded, pool.tensor, scratch=pool.scratch if graphs else None),
            prompts,
            tables,
            steps,
            device,
        )
        for kind, graphs in (("graphs", True), ("launches", False))
    }
    tokens = batch * (num_tokens + steps)
    return {
        "model": name,
        "prompt_tokens": num_tokens,
        "batch": batch,
        "ours": ours,
        "tokens_per_s": tokens / ours["graphs"]["seconds"],
        "generate_batch": peer,
    }


def serve(
    runner: ModelRunner, prompts: list[Any], tables: list[list[int]], steps: int, device: str
) -> dict[str, float]:
    """All prompts prefilled one by one, then decoded together."""
    runner.warm_up()
    length = len(prompts[0])
    began = now(device)
    for number, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
        runner.step(Batch([Span(number, prompt, 0, table, sample=True, params=GREEDY)]))
    prefilled = now(device)
    for step in range(steps):
        spans = [
            Span(n, prompt[:1], length + step, table, sample=True, params=GREEDY)
            for n, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
        ]
        runner.step(Batch(spans))
    ended = now(device)
    for number in range(len(prompts)):
        runner.forget(number)
    return {
        "seconds": ended - began,
        "prefill_tokens_per_s": len(prompts) * length / (prefilled - began),
        "decode_step_ms": (ended - prefilled) / steps * 1e3,
        "decode_tokens_per_s": len(prompts) * steps / (ended - prefilled),
    }


def generate_batch(model: Any, prompts: list[Any], steps: int) -> dict[str, Any]:
    """transformers' continuous batching over the same prompts: all of prefill and decode.

    It is given blocks for these prompts and no more, and warms up on others before it is timed.
    """
    settings = GenerationConfig(max_new_tokens=steps, do_sample=False, eos_token_id=-1)
    tokens = sum(len(prompt) + steps for prompt in prompts)
    try:
        sizes = ContinuousBatchingConfig(
            num_blocks=2 * len(prompts) + 2 * tokens // 256, max_batch_tokens=2048
        )

        def generate(inputs: list[list[int]]) -> None:
            model.generate_batch(
                inputs,
                generation_config=settings,
                continuous_batching_config=sizes,
                persistent_manager=True,
            )

        generate([prompt[::-1][:32].tolist() for prompt in prompts])
        started = time.perf_counter()
        generate([prompt.tolist() for prompt in prompts])
        seconds = time.perf_counter() - started
    except Exception as error:  # noqa: BLE001 - its absence is a figure of its own
        return {"error": repr(error)[:200]}
    finally:
        with contextlib.suppress(Exception):
            model.destroy_cached_continuous_batching_manager()
    return {"seconds": seconds, "tokens_per_s": tokens / seconds}


def _uneven_batch(device: str, small: bool) -> dict[str, Any]:
    """Milliseconds of a decode step: 32 sequences, 33, and 33 of which the first is long."""
    long, short = (512, 64) if small else (32 << 10, 128)
    config = TINY if small else shape(8, 4096, 32, 8, 14336, 2 * long)
    loaded = described(random_model(config, device), device)
    per_short = short // BLOCK + 1
    first = list(range(long // BLOCK + 1))
    num_blocks = len(first) + 33 * per_short
    pool = DevicePool(loaded.layout(BLOCK), num_blocks, device)
    runner = ModelRunner(loaded, pool.tensor, scratch=pool.scratch)
    runner.warm_up()
    token = np.ones(1, np.int32)
    shorts = [
        Span(
            n,
            token,
            short,
            [len(first) + n * per_short + i for i in range(per_short)],
            True,
            GREEDY,
        )
        for n in range(33)
    ]
    batches = {
        "32_short": shorts[:32],
        "33_short": shorts,
        "33_one_long": [Span(99, token, long, first, True, GREEDY), *shorts[:32]],
    }
    times: dict[str, Any] = {
        name: round(timed(device, lambda some=spans: runner.step(Batch(some))) * 1e3, 3)
        for name, spans in batches.items()
    }
    slower = times["33_one_long"] / times["33_short"]
    what = f"a long sequence slows its batch {slower:.2f} times, {MOST_SLOWED} at most"
    return times | {"what": what, "ok": device != "cuda" or slower <= MOST_SLOWED}


def _sampling(device: str, vocab_size: int) -> dict[str, Any]:
    """Milliseconds to choose 64 tokens: greedy, and by top_p, top_k and min_p together."""
    logits = torch.randn(64, vocab_size, device=device)
    sampler = Sampler(frozenset())
    drawn = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, seed=1)
    times = {}
    for name, params in (("greedy", GREEDY), ("drawn", drawn)):
        spans = [Span(n, np.ones(1, np.int32), 1, [0], True, params) for n in range(64)]
        times[name] = timed(device, lambda some=spans: sampler.sample(logits, some)) * 1e3
    return {name: round(ms, 3) for name, ms in times.items()}
