"""Parity and benches on a CUDA machine, in minutes and without a network; prints and writes JSON.

    python -m tests.bench.gpu_check [--device cuda] [--json artifacts/gpu-check.json] [--small]

Needs torch, triton, transformers, numpy and xxhash only, and no model: weights are random.
`--device cpu --small` runs the same code where there is no GPU; a test does. Estimates: a pinned
copy runs at the bus's rate whatever asks for it, so promotion and demotion should reach 90 % of one
plain `copy_` of the same bytes; a decode step of an 8B-shaped bfloat16 model reads 16 GB of weights
once, 3.3 ms at 4.8 TB/s.
"""

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
)

from engine.attention.varlen import has_block_tables
from engine.batch import Batch, Span
from engine.execution.runner import ModelRunner
from engine.models.load import LoadedModel, describe
from engine.request import SamplingParams
from engine.testing.models import ARCHITECTURES, bytes_tokenizer, tiny_model
from tests.bench.provenance import commit
from tiers.blocks.frames import FrameArena
from tiers.blocks.layout import BlockLayout
from tiers.memory.device import DevicePool

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
BLOCK = 64


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, default=Path("artifacts/gpu-check.json"))
    parser.add_argument("--small", action="store_true", help="small shapes, to try the code itself")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here; --device cpu --small tries the code without one")
    started = time.perf_counter()
    figures: dict[str, Any] = {"machine": _machine(options.device)}
    figures["parity"] = [parity(name, options.device) for name in ARCHITECTURES]
    figures["copies"] = copies(options.device, num_blocks=8 if options.small else 256)
    shapes = {"tiny": _shape(2, 64, 4, 2, 128)}
    if not options.small:
        shapes = {"135m": _shape(30, 576, 9, 3, 1536), "8b": _shape(32, 4096, 32, 8, 14336)}
    figures["speed"] = [
        speed(name, config, options.device, 128 if options.small else 2048)
        for name, config in shapes.items()
    ]
    figures["seconds"] = round(time.perf_counter() - started, 1)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))
    if not all(row["same_tokens"] for row in figures["parity"]):
        sys.exit("parity failed")


def parity(name: str, device: str) -> dict[str, Any]:
    """Greedy tokens on the device: cold, and from blocks that went to pinned memory and back."""
    loaded = _moved(tiny_model(name), device)
    layout = loaded.layout(16)
    pool, arena = DevicePool(layout, 32, device), FrameArena(layout, 16, device)
    runner = ModelRunner(loaded, pool.tensor, scratch=pool.scratch)
    prompt = np.array([(7 * i * i + 3) % loaded.vocab_size for i in range(70)], np.int32)
    cold = _generate(runner, 1, prompt, 0, list(range(8)), 8)
    frames = [arena.take() for _ in range(4)]
    held = [frame for frame in frames if frame is not None]
    outs = [pool.copy_out(slot, frame) for slot, frame in enumerate(held)]
    while not all(copy.done() for copy in outs):
        time.sleep(0.001)
    pool.copy_in(held, [20, 21, 22, 23])
    hit = _generate(runner, 2, prompt, 64, [20, 21, 22, 23, 24, 25, 26, 27], 8)
    launched = ModelRunner(loaded, pool.tensor)
    eager = _generate(launched, 3, prompt, 0, list(range(8, 16)), 8)
    same = {"from_host": hit == cold, "without_graphs": eager == cold}
    return {"model": name, "same_tokens": all(same.values()), **same, "tokens": cold}


def copies(device: str, num_blocks: int) -> dict[str, Any]:
    """Promotion and demotion, block by block, as a share of one plain pinned `copy_`."""
    layout = BlockLayout.uniform(
        num_layers=32, block_size=BLOCK, num_kv_heads=8, head_dim=128, dtype="bfloat16"
    )
    pool, arena = DevicePool(layout, num_blocks, device), FrameArena(layout, num_blocks, device)
    frames = [frame for _ in range(num_blocks) if (frame := arena.take()) is not None]
    slots = list(range(num_blocks))
    pinned = torch.cuda.is_available()
    plain = torch.empty(pool.tensor.shape, dtype=layout.torch_dtype, pin_memory=pinned)
    times = {
        "plain_up": _timed(device, lambda: pool.tensor.copy_(plain, non_blocking=True)),
        "plain_down": _timed(device, lambda: plain.copy_(pool.tensor, non_blocking=True)),
        "promote": _timed(device, lambda: pool.copy_in(frames, slots)),
        "demote": _timed(
            device, lambda: [pool.copy_out(s, f) for s, f in zip(slots, frames, strict=True)]
        ),
    }
    nbytes = num_blocks * layout.nbytes
    return {
        "block_bytes": layout.nbytes,
        "gb_per_s": {name: nbytes / seconds / 1e9 for name, seconds in times.items()},
        "promote_share": times["plain_up"] / times["promote"],
        "demote_share": times["plain_down"] / times["demote"],
    }


def speed(name: str, config: LlamaConfig, device: str, num_tokens: int) -> dict[str, Any]:
    """Prefill and decode tokens a second, beside transformers' `generate_batch` in the same run."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval().requires_grad_(False)
    batch, steps = 8, 32
    prompts = [
        np.array([(31 * i + 17 * n) % config.vocab_size for i in range(num_tokens)], np.int32)
        for n in range(batch)
    ]
    peer = generate_batch(model, prompts, steps)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()  # the peer's pool of blocks is most of the device
    loaded = describe(
        name,
        model,
        bytes_tokenizer(),
        weights_digest=bytes(16),
        dtype=str(dtype).removeprefix("torch."),
        device=device,
    )
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
    began = _now(device)
    for number, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
        runner.step(Batch([Span(number, prompt, 0, table, sample=True, params=GREEDY)]))
    prefilled = _now(device)
    for step in range(steps):
        spans = [
            Span(n, prompt[:1], length + step, table, sample=True, params=GREEDY)
            for n, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
        ]
        runner.step(Batch(spans))
    ended = _now(device)
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


def _generate(
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


def _moved(loaded: LoadedModel, device: str) -> LoadedModel:
    """A tiny model described anew for the device; packed for a CPU it is used as it is."""
    if device == "cpu":
        return loaded
    model: Any = AutoModelForCausalLM.from_config(loaded.model.config, dtype=torch.float32)
    return describe(
        loaded.name,
        model.to(device).eval().requires_grad_(False),
        loaded.tokenizer,
        weights_digest=loaded.weights_digest,
        dtype="float32",
        device=device,
    )


def _shape(layers: int, hidden: int, heads: int, kv_heads: int, inner: int) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def _timed(device: str, work: Callable[[], object], rounds: int = 5) -> float:
    """Median seconds of `work`, the device idle before and after."""
    work()
    seconds = []
    for _ in range(rounds):
        started = _now(device)
        work()
        seconds.append(_now(device) - started)
    return statistics.median(seconds)


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {
        "device": name,
        "torch": torch.__version__,
        "varlen_block_tables": has_block_tables(),
        "commit": commit(),
    }


if __name__ == "__main__":
    main()
