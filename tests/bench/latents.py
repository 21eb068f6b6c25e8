"""What keeping latents saves: bytes a token, and time to first token from each tier.

    python -m tests.bench.latents --output tests/bench/results/latents.json

A model with the attention of DeepSeek-V3 (128 heads, latents of 512, rotated keys of 64) and few,
narrow, dense layers, of random weights; served once with latents in its blocks, once with its heads
expanded, as transformers' modules hand them to attention. Expanded keys and values are of unequal
size, so that on a CPU the reference attention serves them.

Estimate: 2 layers keep 2 * 576 * 2 = 2,304 bytes a token against 2 * 40,960 * 2 = 163,840, 71 times
less; at 2 GB/s from disk a prompt of 512 tokens takes 1 ms against 42 ms, and the forward of the
question comes on top of both.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import xxhash
from transformers import AutoModelForCausalLM, DeepseekV3Config

from cachesvc.bench import Scenario, as_json
from cachesvc.config.sections import EngineSection
from engine.models import probe
from engine.models.load import LoadedModel, describe
from tests.bench.provenance import commit, machine
from tests.support.models import VOCAB_SIZE, bytes_tokenizer

NUM_LAYERS, HIDDEN, QUERY_LATENT = 2, 256, 64


def model() -> Any:
    config = DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        q_lora_rank=QUERY_LATENT,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        first_k_dense_replace=NUM_LAYERS,
        max_position_embeddings=8192,
        eos_token_id=256,
    )
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return made.eval().requires_grad_(False)


def loaded(kept: str) -> LoadedModel:
    with mock.patch.object(probe, "absorb", probe.absorb if kept == "latents" else lambda _: 0):
        return describe(
            kept,
            model(),
            bytes_tokenizer(),
            weights_digest=xxhash.xxh3_128_digest(kept.encode()),
            dtype="float32",
            device="cpu",
        )


def measure(kept: str, sizes: list[int], repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        scenario = Scenario(
            loaded(kept),
            kv_dtype="bfloat16",
            data_dir=Path(folder),
            engine=EngineSection(chunk_tokens=256),  # its warm-up is one
            block_size=64,
            largest=max(sizes),
            repeats=repeats,
        )
        results = scenario.run(sizes, print)
        on_disk = sum(
            each.stat().st_blocks * 512 for each in Path(folder).rglob("*") if each.is_file()
        )
    return {
        "kept": kept,
        "token_bytes": scenario.layout.token_nbytes,
        "folder_bytes": on_disk,
        "results": as_json(results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[512])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    both = [measure(kept, arguments.sizes, arguments.repeats) for kept in ("latents", "heads")]
    told = {
        "bench": "latents",
        "commit": commit(),
        "machine": machine(),
        "note": "the machine was shared with other work; compare within this file",
        "layers": NUM_LAYERS,
        "hidden_size": HIDDEN,
        "threads": torch.get_num_threads(),
        "kv_dtype": "bfloat16",
        "measured": both,
    }
    text = json.dumps(told, indent=2) + "\n"
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
