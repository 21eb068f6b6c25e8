"""Time to first token of vLLM with a node under it, beside its own cache and ExampleConnector.

    make test-vllm                              # once: the environment with vLLM
    .venv/bin/python -m tests.bench.vllm_connector --rounds 2 --beside example --json FILE
    .venv/bin/python -m tests.bench.vllm_connector --rounds 10 --throttle 100    # as root

One engine for each contestant on the default model (float32), all running throughout. In each round
a new prompt of each length is asked of each contestant in turn: cold, then from each of its tiers.

    ours      device  vLLM's own prefix cache
              host    after that was emptied
              disk    after the node was restarted too; its files are in the page cache
    example   stored  vLLM's ExampleConnector, which keeps each prompt's KV in files

`same` counts the hits whose token and its logprob, to the last bit, are those of the contestant's
first hit. A contestant that answers without a hit ends the run.

With `--throttle`, the node's disk has prompts, none of them in the page cache, and reads so many MB
a second. In each round one of each length is asked, and a new one that nobody has, in turns: `held`
and `new`. `loaded` has the tokens of each held prompt that were loaded.

Estimate for 2,048 tokens, 94 MB of KV: a device hit computes the last block, up to 128 tokens; a
host hit copies 94 MB once more, 12 to 20 ms at 5 to 8 GB/s; a disk hit reads and expands them, 94
MB at 1 to 3 GB/s, 30 to 90 ms. At 100 MB/s the 80 MB of a record take 800 ms.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from engine.models.files import DEFAULT_MODEL, find
from tests.bench.report import arguments, tell
from tests.patience import until
from tests.vllm.processes import Engine, RunningNode
from tests.vllm.throttled import forget_pages, throttle

BLOCK = 128  # tokens of vLLM's blocks
NEW = 10_000  # and on: the seeds of prompts that nobody has
Times = dict[int, dict[str, list[float]]]  # milliseconds by length and way


def prompt(length: int, seed: int) -> list[int]:
    return [(place * 7919 + seed * 104_729) % 40_000 + 100 for place in range(length)]


class Contestant:
    """One engine. `ways` measures one prompt from each of its tiers."""

    def __init__(self, name: str, engine: Engine, rest_s: float) -> None:
        self.name, self.engine, self._rest_s = name, engine, rest_s
        self._first: dict[tuple[int, ...], Any] = {}  # by the prompt's beginning
        self.same: list[bool] = []

    def ask(self, ids: list[int]) -> dict[str, Any]:
        """Asked at rest: vLLM's workers go on spinning for a while after a request."""
        time.sleep(self._rest_s)
        (answer,) = self.engine.generate(ids, max_tokens=1)
        return answer | {"ms": answer["seconds"] * 1e3}

    def hit(self, ids: list[int], tier: str | None = None) -> float:
        """Milliseconds of an answer to which all whole blocks were hits."""
        answer, whole = self.ask(ids), (len(ids) - 1) // BLOCK * BLOCK
        right = answer["cached"] >= whole and (tier is None or answer["hits"] == {tier: whole})
        if not right:
            raise SystemExit(f"{self.name} did not serve {len(ids)} tokens from {tier}: {answer}")
        bits = answer["tokens"], answer["logprobs"]
        self.same.append(self._first.setdefault((len(ids), *ids[:4]), bits) == bits)
        return float(answer["ms"])

    def cold(self, ids: list[int]) -> float:
        answer = self.ask(ids)
        if answer["cached"]:
            raise SystemExit(f"{self.name} was to compute, and had {answer['cached']} tokens")
        return float(answer["ms"])

    def ways(self, ids: list[int]) -> dict[str, float]:
        times = {"cold": self.cold(ids)}
        time.sleep(1)  # it stores
        self.engine.forget()
        return times | {"stored": self.hit(ids)}


class Ours(Contestant):
    """Over a node with a disk."""

    def __init__(self, engine: Engine, rest_s: float, node: RunningNode) -> None:
        super().__init__("cachesvc", engine, rest_s)
        self.node = node

    def ways(self, ids: list[int]) -> dict[str, float]:
        times = {"cold": self.cold(ids)}
        self.node.until_on_disk()
        times["device"] = self.hit(ids)
        self.engine.forget()
        times["host"] = self.hit(ids, "host")
        self.restart_node(lambda: None)
        return times | {"disk": self.hit(ids, "disk")}

    def restart_node(self, between: Callable[[], None]) -> None:
        self.engine.forget()
        self.node.until_on_disk()
        self.node.stop()
        between()
        self.node.start("2GiB", "32GiB")
        until(lambda: self.node.stats()["num_clients"] > 1)  # the engine joins it by itself
        time.sleep(2)  # the node touches spare frames, which a request at once would wait for


def contestants(stack: ExitStack, folder: Path, asked: argparse.Namespace) -> list[Contestant]:
    model = find(DEFAULT_MODEL, folder / "models", lambda what, part: None)
    node = RunningNode(folder)
    node.start("2GiB", "32GiB")
    stack.callback(node.kill)

    def engine(name: str, node: Path | None = None, **options: Any) -> Engine:
        started = Engine(model, node, folder / f"{name}.log", block_size=BLOCK, **options)
        stack.callback(started.kill)
        return started

    found = [lambda: Ours(engine("ours", node.socket), asked.rest, node)]
    if "example" in asked.beside:
        told = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
        }
        example = partial(engine, "example", kv_transfer_config=told)
        found.append(lambda: Contestant("example", example(), asked.rest))
    with ThreadPoolExecutor(len(found)) as threads:  # they take half a minute to start
        everybody = list(threads.map(lambda each: each(), found))
    for contestant in everybody:  # not counted: everything is touched once
        contestant.ways(prompt(512, 999))
    return everybody


def every_tier(everybody: list[Contestant], asked: argparse.Namespace) -> Times:
    times: Times = {length: defaultdict(list) for length in asked.lengths}
    for number in range(asked.rounds):
        for length in asked.lengths:
            turn = number % len(everybody)
            for contestant in everybody[turn:] + everybody[:turn]:
                for way, ms in contestant.ways(prompt(length, length + number)).items():
                    times[length][f"{contestant.name} {way}"].append(round(ms, 1))
    return times


def throttled(ours: Ours, folder: Path, asked: argparse.Namespace) -> Times:
    """Prompts of every length that a slow disk has, beside those that nobody has."""
    times: Times = {length: defaultdict(list) for length in asked.lengths}
    for number in range(asked.rounds):
        for length in asked.lengths:
            ours.cold(prompt(length, length + number))
    with throttle(folder) as bound:
        ours.restart_node(partial(forget_pages, ours.node.disk))
        bound.add(ours.node.pid)
        bound.set(asked.throttle * 1_000_000)
        for number in range(asked.rounds):
            pause(asked)
            for length in asked.lengths:
                for way in ("held", "new") if number % 2 else ("new", "held"):
                    ours.node.until_on_disk()
                    answer = ours.ask(prompt(length, length + number + NEW * (way == "new")))
                    times[length][way].append(round(answer["ms"], 1))
                    if way == "held":
                        times[length]["loaded"].append(answer["hits"].get("disk", 0))
    return times


def pause(asked: argparse.Namespace) -> None:
    if asked.pause:
        input("ready; press Enter to measure\n")


def measure(asked: argparse.Namespace) -> tuple[Times, dict[str, str]]:
    with tempfile.TemporaryDirectory(dir=asked.dir) as name, ExitStack() as stack:
        everybody = contestants(stack, Path(name), asked)
        if asked.throttle:
            ours = everybody[0]
            assert isinstance(ours, Ours)
            return throttled(ours, Path(name), asked), {}
        pause(asked)
        times = every_tier(everybody, asked)
        return times, {each.name: f"{sum(each.same)} of {len(each.same)}" for each in everybody}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_024, 2_048, 3_968])
    parser.add_argument("--beside", type=lambda text: text.split(","), default=[])
    parser.add_argument("--rest", type=float, default=1.0, help="seconds before a question")
    parser.add_argument("--throttle", type=int, default=0, help="MB/s that the node's disk reads")
    parser.add_argument("--dir", type=Path, help="where the disk is; the usual folder without")
    parser.add_argument("--pause", action="store_true", help="wait for Enter before measuring")
    asked = parser.parse_args()
    times, same = measure(asked)
    medians = {
        length: {way: round(statistics.median(ms), 1) for way, ms in ways.items()}
        for length, ways in times.items()
    }
    result = {
        "unit": "milliseconds to the first token; median of the rounds",
        "same": same,
        "median": medians,
        "rounds": times,
    }
    tell(result, asked.json)


if __name__ == "__main__":
    main()
