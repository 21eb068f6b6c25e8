"""Time to first token of vLLM with a node under it: cold, from its own cache, from host, from disk.

    make test-vllm                              # once: the environment with vLLM
    .venv/bin/python -m tests.bench.vllm_connector --rounds 3 > result.json

One engine on the default model (float32). In each round a new prompt of each length is asked four
times: cold; again (vLLM's own prefix cache); after that cache was emptied (host memory); after the
node was restarted too (disk, its files in the page cache). The rounds of all lengths alternate.

Estimate for 2,048 tokens, 94 MB of KV: a device hit computes the last block, up to 128 tokens; a
host hit copies 94 MB once more, 12 to 20 ms at 5 to 8 GB/s, and waits for one more scheduling step;
a disk hit reads and expands them, 94 MB at 1 to 3 GB/s, 30 to 90 ms.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.models.files import DEFAULT_MODEL, find
from tests.bench.provenance import commit, machine
from tests.vllm.processes import Engine, RunningNode

LENGTHS = (1_024, 2_048, 3_968)
WAYS = ("cold", "device", "host", "disk")


def prompt(length: int, seed: int) -> list[int]:
    return [(place * 7919 + seed * 104_729) % 40_000 + 100 for place in range(length)]


def ask(engine: Engine, ids: list[int]) -> dict[str, Any]:
    (answer,) = engine.generate(ids, max_tokens=1)
    return answer


def one_round(engine: Engine, node: RunningNode, length: int, seed: int) -> dict[str, float]:
    """Milliseconds of each way. Raises where a prompt was not served from where it should be."""
    ids = prompt(length, seed)
    answers = {"cold": ask(engine, ids)}
    time.sleep(1)  # the blocks go to the node, and from there to its disk, beside what follows
    node.until_on_disk()
    answers["device"] = ask(engine, ids)
    engine.forget()
    answers["host"] = ask(engine, ids)
    engine.forget()
    node.until_on_disk()
    node.stop()
    node.start()
    for other in range(20):  # the engine leaves a node that went away alone for a second
        ask(engine, prompt(256, seed * 100 + other))
        if node.stats()["num_clients"] > 1:
            break
    engine.forget()
    answers["disk"] = ask(engine, ids)
    whole = (length - 1) // 128 * 128
    served = {way: answer["hits"] for way, answer in answers.items()}
    expected = {"cold": {}, "device": {}, "host": {"host": whole}, "disk": {"disk": whole}}
    if served != expected:
        raise SystemExit(f"not served as expected: {served}")
    return {way: answer["seconds"] * 1e3 for way, answer in answers.items()}


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=3)
    rounds = arguments.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = find(DEFAULT_MODEL, folder / "models", lambda what, part: None)[0]
        node = RunningNode(folder)
        node.start()
        engine = Engine(model, node.socket, folder / "vllm.log")
        times: dict[int, dict[str, list[float]]] = {
            length: {way: [] for way in WAYS} for length in LENGTHS
        }
        try:
            one_round(engine, node, LENGTHS[0], 999)  # not counted: everything is touched once
            for number in range(rounds):
                for length in LENGTHS:
                    for way, ms in one_round(engine, node, length, number + 1).items():
                        times[length][way].append(ms)
        finally:
            engine.kill()
            node.kill()
    result = {
        "commit": commit(),
        "machine": machine(),
        "unit": "milliseconds to the first token; median of the rounds",
        "median": {
            length: {way: round(statistics.median(ms), 1) for way, ms in ways.items()}
            for length, ways in times.items()
        },
        "rounds": {
            length: {way: [round(each, 1) for each in ms] for way, ms in ways.items()}
            for length, ways in times.items()
        },
    }
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
