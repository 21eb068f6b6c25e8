"""How many of the processors decoding keeps busy: a share, which a busy machine changes little.

    python -m tests.bench.cores --cache-dir DIR [--json FILE] [--main-thread]

One engine, as a server has it, decodes alone; the CPU time of the process is divided by the time
that passed and by the threads of arithmetic. Where other processes use the machine the share says
little, and the sleeps for each token say it: a team that may not spin sleeps at every region. With
`--main-thread` the main thread makes a team too, which costs the engine's its pace
(docs/measurements, "Threads"). Exits with 1 below the share `--least`.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch

from engine.offline.llm import LLM
from engine.request import SamplingParams
from tests.bench.provenance import commit, machine

DECODED = 48


def used() -> tuple[float, int]:
    """CPU seconds, and how often a thread went to sleep by itself."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_nvcsw


def measure(llm: LLM, length: int) -> dict[str, float]:
    """Of a prompt that is cached: the share of the cores while tokens are decoded."""
    prompt = np.random.default_rng(0).integers(100, 40_000, length).tolist()
    params = SamplingParams(temperature=0, max_tokens=DECODED, ignore_eos=True)
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2))
    begun_s, (cpu_s, slept) = time.perf_counter(), used()
    llm.generate([prompt], params)
    wall_s, (end_s, end_slept) = time.perf_counter() - begun_s, used()
    return {
        "prompt_tokens": length,
        "ms_per_token": round(wall_s / DECODED * 1e3, 1),
        "share": round((end_s - cpu_s) / wall_s / torch.get_num_threads(), 3),
        "sleeps_per_token": round((end_slept - slept) / DECODED, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--least", type=float, default=0.0)
    parser.add_argument("--main-thread", action="store_true")
    given = parser.parse_args()
    if given.main_thread:
        torch.randn(2048, 2048) @ torch.randn(2048, 2048)
    with LLM(cache_dir=given.cache_dir) as llm:
        measure(llm, 64)
        runs = [measure(llm, length) for length in (128, 1024)]
    told = {
        "bench": "cores busy in decode",
        "commit": commit(),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "team_on_main_thread": given.main_thread,
        "load_average": Path("/proc/loadavg").read_text().split()[0],
        "runs": runs,
    }
    text = json.dumps(told, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")
    sys.exit(min(run["share"] for run in runs) < given.least)


if __name__ == "__main__":
    main()
