"""vLLM's two ways from ids to ids, side by side: `python -m tests.bench.token_protocols URL`.

vLLM runs already (`--pid` is its API process), started with --enable-scale-out and
--max-num-seqs 8 or more. Both ways get the same prompts by turns, each under a salt of its own, so
that neither hits what the other computed.
Estimate: both stream an event a token. `generate` does no text, so it may save its detokenizing and
a part of the JSON: some tens of microseconds a token, of several milliseconds.
"""

import argparse
import asyncio
import json
import os
import random
import time
from array import array
from pathlib import Path
from statistics import median

from engine.remote.client import EngineHttp
from engine.remote.protocol import SequenceAsk
from engine.remote.vllm import Completions, Generate
from engine.request import Request, SamplingParams
from tiers.blocks.keys import CacheScope

WAYS = (Completions(priorities=False, grammars=False), Generate(priorities=False, grammars=False))
PROMPT, OUTPUT = 200, 32
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU time of a process, whatever else the machine does."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS


async def stream(http: EngineHttp, way: Completions, model: str, seed: int) -> tuple[float, float]:
    """Milliseconds to the first token, and from then on for each."""
    tokens = array("i", random.Random(seed).choices(range(100, 40_000), k=PROMPT))
    request = Request(
        request_id=f"{way.path}-{seed}-{time.time_ns()}",
        tokens=tokens,
        params=SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True),
        scope=CacheScope(),
    )
    ask = SequenceAsk(
        request=request,
        index=0,
        name=request.request_id,
        model=model,
        end=frozenset(),
        room=1_000,
        salt=f"{type(way).__name__}{seed}",
    )
    times, count = [time.perf_counter()], 0
    async for event in http.events(way.path, way.body(ask)):
        told = way.told(event, ask, count)
        count += len(told.tokens)
        if told.tokens:
            times.append(time.perf_counter())
    assert count == OUTPUT, f"{count} tokens came"
    return 1e3 * (times[1] - times[0]), 1e3 * (times[-1] - times[1]) / (count - 1)


async def main(url: str, rounds: int, pid: int) -> None:
    http = EngineHttp(url)
    _, models = await http.ask("GET", "/v1/models")
    model = models["data"][0]["id"]
    for num_streams in (1, 8):
        found: dict[str, list[tuple[float, float]]] = {way.path: [] for way in WAYS}
        used: dict[str, list[float]] = {way.path: [0.0, 0.0] for way in WAYS}
        for turn in range(-1, rounds):
            for way in WAYS if turn % 2 else WAYS[::-1]:
                seeds = [1_000 * num_streams + 10 * turn + each for each in range(num_streams)]
                before = cpu_s(pid), time.process_time()
                told = await asyncio.gather(*(stream(http, way, model, seed) for seed in seeds))
                if turn >= 0:  # the first warms up
                    found[way.path] += told
                    used[way.path][0] += cpu_s(pid) - before[0]
                    used[way.path][1] += time.process_time() - before[1]
        for path, pairs in found.items():
            first, each = (round(median(values), 2) for values in zip(*pairs, strict=True))
            theirs, ours = (round(1e3 * each_s / (OUTPUT * len(pairs)), 3) for each_s in used[path])
            cpu = {"vllm_cpu_ms_a_token": theirs, "our_cpu_ms_a_token": ours}
            told_of = {"way": path, "streams": num_streams, "ttft_ms": first, "token_ms": each}
            print(json.dumps(told_of | cpu | {"requests": len(pairs)}), flush=True)
    await http.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pid", type=int, required=True)
    given = parser.parse_args()
    asyncio.run(main(given.url, given.rounds, given.pid))
