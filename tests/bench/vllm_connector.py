"""Time to first token of vLLM with a node under it, from every tier, beside other connectors.

    make test-vllm                              # once: the environment with vLLM
    .venv/bin/python -m tests.bench.vllm_connector --rounds 2 --beside example --json FILE

One engine for each contestant on the default model (float32), all running throughout. In each round
a new prompt of each length is asked of each contestant in turn: cold, then from each of its tiers.

    ours      device  vLLM's own prefix cache
              host    after that was emptied
              disk    after the node was restarted too; its files are in the page cache
              remote  after the node was restarted with an empty disk: from a Redis on this machine
    example   files   vLLM's ExampleConnector, which keeps each prompt's KV in files
    offload   host    vLLM's OffloadingConnector with its tier of files; on CUDA only

At the end the engines are started anew (the node too), and the last round's prompts asked again:
`restarted`. `same` counts the hits whose token and its logprob, to the last bit, are those of the
contestant's first hit. A contestant that answers without a hit ends the run.

On a GPU, with a model's folder, without Redis, and with what else vLLM is told:

    python -m tests.bench.vllm_connector --model FOLDER --no-remote --block 16 --beside offload \\
        --memory 16 --python "$(which python)" --lengths 4096 16384 \\
        --vllm '{"dtype": "bfloat16", "max_model_len": 20000, "gpu_memory_utilization": 0.4}'

Estimate for 2,048 tokens, 94 MB of KV: a device hit computes the last block, up to 128 tokens; a
host hit copies 94 MB once more, 12 to 20 ms at 5 to 8 GB/s, and waits for one more scheduling step;
a disk hit reads and expands them, 94 MB at 1 to 3 GB/s, 30 to 90 ms; Redis adds a copy over a
socket, 94 MB at 1 GB/s.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from engine.models.files import DEFAULT_MODEL, find
from tests.bench.report import arguments, tell
from tests.redis_server import redis_server
from tests.vllm.processes import PYTHON, Engine, RunningNode

START_S = 120
DISK = "32GiB"  # at most
Times = dict[str, float]
T = TypeVar("T")


def prompt(length: int, seed: int) -> list[int]:
    return [(place * 7919 + seed * 104_729) % 40_000 + 100 for place in range(length)]


class Contestant:
    """One engine, and what keeps its blocks. `ways` measures one prompt from every tier."""

    def __init__(self, name: str, start: Callable[[], Engine], asked: argparse.Namespace) -> None:
        self.name = name
        self._start = start
        self._rest_s = asked.rest
        self._block = asked.block
        self._first: dict[tuple[int, ...], Any] = {}  # by the prompt's beginning
        self.same: list[bool] = []
        self.engine = start()

    def ask(self, ids: list[int]) -> dict[str, Any]:
        """Asked at rest: vLLM's workers go on spinning for a while after a request."""
        time.sleep(self._rest_s)
        (answer,) = self.engine.generate(ids, max_tokens=1)
        return answer

    def hit(self, ids: list[int], tier: str | None = None) -> float:
        """Milliseconds of an answer to which all whole blocks were hits."""
        answer, whole = self.ask(ids), (len(ids) - 1) // self._block * self._block
        right = answer["cached"] >= whole and (tier is None or answer["hits"] == {tier: whole})
        if not right:
            raise SystemExit(f"{self.name} did not serve {len(ids)} tokens from {tier}: {answer}")
        bits = answer["tokens"], answer["logprobs"]
        self.same.append(self._first.setdefault((len(ids), *ids[:4]), bits) == bits)
        return float(answer["seconds"]) * 1e3

    def cold(self, ids: list[int]) -> float:
        answer = self.ask(ids)
        if answer["cached"]:
            raise SystemExit(f"{self.name} was to compute, and had {answer['cached']} tokens")
        return float(answer["seconds"]) * 1e3

    def ways(self, ids: list[int]) -> Times:
        times = {"cold": self.cold(ids)}
        time.sleep(1)  # it stores
        self.engine.forget()
        return times | {"stored": self.hit(ids)}

    def restart(self) -> None:
        self.engine.kill()
        self.engine = self._start()
        self.ask(prompt(256, 77_777))

    def restarted(self, ids: list[int]) -> Times:
        return {"restarted": self.hit(ids)}


class Ours(Contestant):
    """A node with a disk, and a Redis beneath it."""

    def __init__(
        self, node: RunningNode, start: Callable[[], Engine], asked: argparse.Namespace
    ) -> None:
        super().__init__("cachesvc", start, asked)
        self._node, self._memory, self._is_remote = node, f"{asked.memory}GiB", asked.remote
        self._disk, self._disks = node.disk, 0

    def ways(self, ids: list[int]) -> Times:
        times = {"cold": self.cold(ids)}
        self._until_stored(len(ids) // self._block)
        times["device"] = self.hit(ids)
        self.engine.forget()
        times["host"] = self.hit(ids, "host")
        times["disk"] = self._after_restart(ids, "disk", self._disk)
        if not self._is_remote:
            return times
        self._disks += 1
        empty = self._disk.with_name(f"empty-{self._disks}")
        times["remote"] = self._after_restart(ids, "remote", empty)
        self._restart_node(self._disk)  # which has every prompt so far
        return times

    def restart(self) -> None:
        self._restart_node(self._disk)
        super().restart()

    def restarted(self, ids: list[int]) -> Times:
        return {"disk, restarted": self.hit(ids, "disk")}

    def _after_restart(self, ids: list[int], tier: str, disk: Path) -> float:
        self.engine.forget()
        self._restart_node(disk)
        for other in range(20):  # the engine leaves a node that went away alone for a second
            self.engine.generate(prompt(256, time.monotonic_ns() % 10**6 + other), max_tokens=1)
            if self._node.stats()["num_clients"] > 1:
                break
        self.engine.forget()
        return self.hit(ids, tier)

    def _restart_node(self, disk: Path) -> None:
        self._node.until_on_disk()
        self._node.stop()
        self._node.disk = disk
        self._node.start(self._memory, DISK)

    def _until_stored(self, num_blocks: int) -> None:
        give_up = time.monotonic() + START_S
        while self._is_remote and self._node.pool()["remote"]["stored"] < num_blocks:
            if time.monotonic() > give_up:
                raise SystemExit(f"Redis did not get {num_blocks} blocks: {self._node.stats()}")
            time.sleep(0.05)
        self._node.until_on_disk()


def contestants(stack: ExitStack, folder: Path, asked: argparse.Namespace) -> list[Contestant]:
    model = asked.model or find(DEFAULT_MODEL, folder / "models", lambda what, part: None)[0]
    more: tuple[str, ...] = ()
    if asked.remote:
        url = stack.enter_context(redis_server(folder)) + "?socket_timeout=60"
        more = ("--remote-url", url, "--remote-writes", "all")
    node = RunningNode(folder, more=more)
    node.start(f"{asked.memory}GiB", DISK)
    stack.callback(node.kill)
    usual = {"block_size": asked.block, **asked.vllm}

    def starts(name: str, node: Path | None = None, **options: Any) -> Callable[[], Engine]:
        def start() -> Engine:
            log = folder / f"{name}-{time.time_ns()}.log"
            started = Engine(model, node, log, asked.python, **usual, **options)
            stack.callback(started.kill)
            return started

        return start

    found: list[Callable[[], Contestant]] = [lambda: Ours(node, starts("ours", node.socket), asked)]
    if "example" in asked.beside:
        told = other_connector("ExampleConnector", shared_storage_path=str(folder / "example"))
        found.append(lambda: Contestant("example", starts("example", **told), asked))
    if "offload" in asked.beside:
        files = {"type": "fs", "root_dir": str(folder / "offload")}
        sizes = {"cpu_bytes_to_use": asked.memory << 30, "secondary_tiers": [files]}
        offload = other_connector("OffloadingConnector", spec_name="TieringOffloadingSpec", **sizes)
        found.append(lambda: Contestant("offload", starts("offload", **offload), asked))
    return at_once(found)


def at_once(work: Sequence[Callable[[], T]]) -> list[T]:
    """Engines take half a minute to start, most of it on one core."""
    with ThreadPoolExecutor(len(work)) as threads:
        return list(threads.map(lambda each: each(), work))


def other_connector(name: str, **extra: Any) -> dict[str, Any]:
    told = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {"kv_transfer_config": told}


def measure(asked: argparse.Namespace) -> tuple[dict[int, dict[str, list[float]]], dict[str, str]]:
    """Milliseconds by length and way, a number a round; and how many hits had the same bits."""
    times: dict[int, dict[str, list[float]]] = {
        length: defaultdict(list) for length in asked.lengths
    }

    def note(length: int, contestant: Contestant, ways: Times) -> None:
        for way, ms in ways.items():
            times[length][f"{contestant.name} {way}"].append(round(ms, 1))

    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        everybody = contestants(stack, Path(name), asked)
        for contestant in everybody:  # not counted: everything is touched once
            contestant.ways(prompt(512, 999))
        for number in range(asked.rounds):
            for length in asked.lengths:
                turn = number % len(everybody)
                for contestant in everybody[turn:] + everybody[:turn]:
                    note(length, contestant, contestant.ways(prompt(length, length + number)))
        at_once([contestant.restart for contestant in everybody])
        for length in asked.lengths:
            for contestant in everybody:
                last = prompt(length, length + asked.rounds - 1)
                note(length, contestant, contestant.restarted(last))
        same = {each.name: f"{sum(each.same)} of {len(each.same)}" for each in everybody}
    return times, same


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_024, 2_048, 3_968])
    parser.add_argument("--beside", type=lambda text: text.split(","), default=[])
    parser.add_argument("--rest", type=float, default=1.0, help="seconds before a question")
    parser.add_argument("--model", type=Path, help="a model's folder; the default model without")
    parser.add_argument("--python", type=Path, default=PYTHON, help="of an environment with vLLM")
    parser.add_argument("--vllm", type=json.loads, default={}, help="what else it is told, as JSON")
    parser.add_argument("--block", type=int, default=128, help="tokens of vLLM's blocks")
    parser.add_argument("--memory", type=int, default=1, help="GiB, of the node and of offload")
    parser.add_argument("--no-remote", dest="remote", action="store_false", help="without Redis")
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
