"""How a model computes beside busy processes, in a container's quota, and on few processors.

    python -m tests.bench.neighbours --cache-dir DIR [--json FILE] [--rounds 2] [--busy 0,2,6]
                                     [--quotas 0.5,1,2] [--cores 1,2]
                                     [--before CHECKOUT] [--vllm VENV/bin/python --model FOLDER]

The same model runs in several processes: cachesvc, cachesvc with one thread, an earlier checkout of
it and vLLM, where they are given. They start one after another and are asked in turn, while as many
processes as `--busy` says count beside them. A rest before each question lets the threads of the
one before stop polling. Each is asked a new prompt of 512 tokens (`cold_ms`), the same with ten
more (`hit_ms`), and for eight tokens after it (`token_ms`). `times_quiet` divides by the same
process's figure with nothing beside it; `fair` is the share that as many threads as there are
processors would get. The quotas need a writable cgroup.

vLLM's interpreter runs this file too, so the file imports nothing of cachesvc at its top.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT, NEW, DECODED = 512, 10, 8
ROOT = Path(__file__).parents[2]
PERIOD_US = 100_000
REST_S = 2.0  # vLLM's threads poll for a second after an answer
BUSY = "while True: pass"

Answer = Callable[[list[int], int], None]  # a prompt, with so many tokens


# The process that computes.


def compute(package: str, options: Mapping[str, Any]) -> None:
    """Answer each line of standard input, `[seed]`, with the milliseconds of each case."""
    begun = time.perf_counter()
    answer = _vllm(options) if package == "vllm" else _cachesvc(Path(options["cache_dir"]))
    _tell({"start_s": round(time.perf_counter() - begun, 2)})
    for line in sys.stdin:
        draw = random.Random(line)
        prompt = [draw.randrange(100, 40_000) for _ in range(PROMPT)]
        longer = [*prompt, *(draw.randrange(100, 40_000) for _ in range(NEW))]

        def ask(tokens: list[int], count: int) -> float:
            asked = time.perf_counter()
            answer(tokens, count)
            return (time.perf_counter() - asked) * 1e3

        cold, hit, first = ask(prompt, 1), ask(longer, 1), ask(longer, 1)
        token = (ask(longer, 1 + DECODED) - first) / DECODED
        _tell({"cold_ms": cold, "hit_ms": hit, "token_ms": token})


def _vllm(options: Mapping[str, Any]) -> Answer:
    from vllm import LLM, SamplingParams

    llm = LLM(**options)

    def answer(tokens: list[int], count: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)

    return answer


def _cachesvc(folder: Path) -> Answer:
    from engine.models.files import DEFAULT_MODEL
    from engine.models.load import load_model
    from engine.request import SamplingParams
    from tests.support.composed import Composed

    loaded = load_model(DEFAULT_MODEL, device="cpu", dtype="float32", cache_dir=folder)
    composed = Composed(loaded, folder, device_bytes=1 << 30, host_bytes=0)

    def answer(tokens: list[int], count: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        composed.ask(tokens, params)

    return answer


def _tell(value: Mapping[str, float]) -> None:
    print("told " + json.dumps(value), flush=True)


# The process that asks.


@dataclass(frozen=True)
class Way:
    """One way to compute: an interpreter, its package, and what its environment adds."""

    name: str
    python: str
    package: str
    options: Mapping[str, Any]
    environment: Mapping[str, str]
    tree: Path = ROOT


class Running:
    """The process of a way, started inside a place."""

    def __init__(self, way: Way, place: Sequence[str], log: Path) -> None:
        self.way = way
        arguments = [way.python, "-P", __file__, "--compute", way.package, json.dumps(way.options)]
        with log.open("wb") as errors:
            # A group of its own, which ends whole: vLLM's core is a child that outlives its parent.
            # No session of its own: the scheduler may share processors by session, and then it does
            # not matter how many others are busy.
            self._process = subprocess.Popen(
                [*place, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                process_group=0,
                cwd=way.tree,
                env={**os.environ, "PYTHONPATH": str(way.tree), **way.environment},
            )
        self._log = log
        self.start_s = self._read()["start_s"]

    def ask(self, seed: str) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(seed + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        time.sleep(0.5)  # its children end, so that a cgroup can be removed

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("told "):
                told: dict[str, float] = json.loads(line[5:])
                return told
        sys.exit(f"{self.way.name} ended:\n{self._log.read_text()[-2000:]}")


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """So many processes that count, and give up no processor."""
    counting = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(number)]
    try:
        time.sleep(0.5 if number else 0)
        yield
    finally:
        for process in counting:
            process.kill()
            process.wait()


@contextlib.contextmanager
def quota(cores: float) -> Iterator[list[str]]:
    """A cgroup of so many processors' time. Yields the command that a process enters it by."""
    name = f"cachesvc-neighbours-{os.getpid()}"
    first = Path("/sys/fs/cgroup/cpu")  # of the first version; the second has one tree
    group = (first if first.is_dir() else first.parent) / name
    group.mkdir()
    try:
        if first.is_dir():
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(round(cores * PERIOD_US)))
        else:
            (group / "cpu.max").write_text(f"{round(cores * PERIOD_US)} {PERIOD_US}")
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    finally:
        group.rmdir()


def ways(given: argparse.Namespace) -> list[Way]:
    ours: dict[str, Any] = {"cache_dir": str(given.cache_dir)}
    found = [
        Way("cachesvc", sys.executable, "cachesvc", ours, {}),
        Way("one thread", sys.executable, "cachesvc", ours, {"OMP_NUM_THREADS": "1"}),
    ]
    if given.before:
        found.append(Way("before", sys.executable, "cachesvc", ours, {}, given.before.absolute()))
    if given.vllm:
        theirs = {"model": given.model, "dtype": "float32", "max_model_len": 4096}
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1"}
        found.append(Way("vllm", given.vllm, "vllm", theirs, environment))
    return found


def measure(
    given: argparse.Namespace, name: str, place: Sequence[str], num_cores: int
) -> dict[str, Any]:
    """The figures of every way in one place, by the number of busy processes beside it."""
    seen: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    running: list[Running] = []
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as logs:
        for way in ways(given):
            running.append(Running(way, place, Path(logs) / "log"))
            stack.callback(running[-1].close)
            running[-1].ask("to warm up")
        for number in range(given.rounds):
            for count in given.busy:
                with busy(count):
                    for each in running:
                        time.sleep(REST_S)
                        told = each.ask(f"{number} {count}")
                        print(name, count, each.way.name, told, file=sys.stderr, flush=True)
                        for case, ms in told.items():
                            seen[each.way.name, count][case].append(ms)
    figures: dict[str, Any] = {}
    for each in running:
        by_count = {count: seen[each.way.name, count] for count in given.busy}
        figures[each.way.name] = {
            "start_s": each.start_s,
            **{str(count): _summary(cases) for count, cases in by_count.items()},
            "times_quiet": _times(by_count),
        }
    fair = {str(count): (num_cores + count) / max(num_cores, 1) for count in given.busy}
    return {"place": name, "fair": fair, "ways": figures}


def _summary(cases: Mapping[str, list[float]]) -> dict[str, float]:
    return {case: round(statistics.median(ms), 1) for case, ms in cases.items()}


def _times(by_count: Mapping[int, Mapping[str, list[float]]]) -> dict[str, dict[str, float]]:
    if 0 not in by_count:
        return {}
    quiet = {case: statistics.median(ms) for case, ms in by_count[0].items()}
    return {
        str(count): {
            case: round(statistics.median(ms) / quiet[case], 2) for case, ms in cases.items()
        }
        for count, cases in by_count.items()
        if count
    }


def places(given: argparse.Namespace) -> Iterator[tuple[str, Sequence[str], int]]:
    """Each place's name, the command that enters it, and its number of processors."""
    usable = sorted(os.sched_getaffinity(0))
    if not given.quotas and not given.cores:
        yield "whole machine", [], len(usable)
    for cores in given.cores:
        cpus = ",".join(map(str, usable[:cores]))
        yield f"{cores} processors", ["taskset", "-c", cpus], cores
    for cores in given.quotas:
        with quota(cores) as enter:
            yield f"quota of {cores:g}", enter, len(usable)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compute", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--busy", type=_numbers(int), default=[0, 2, 6])
    parser.add_argument("--quotas", type=_numbers(float), default=[])
    parser.add_argument("--cores", type=_numbers(int), default=[])
    parser.add_argument("--before", type=Path, help="another checkout, run with this interpreter")
    parser.add_argument("--vllm", help="the interpreter of vLLM's environment")
    parser.add_argument("--model", help="the model's folder, for vLLM")
    given = parser.parse_args()
    if given.compute:
        return compute(given.compute[0], json.loads(given.compute[1]))
    if given.cache_dir is None or (given.vllm and not given.model):
        parser.error("give --cache-dir, and --model with --vllm")
    from tests.bench.report import tell

    load = Path("/proc/loadavg").read_text().split()[0]
    measured = [measure(given, *place) for place in places(given)]
    tell({"rounds": given.rounds, "load_average": load, "places": measured}, given.json)
    return None


def _numbers(kind: type) -> Any:
    return lambda text: [kind(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
