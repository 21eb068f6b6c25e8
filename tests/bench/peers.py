"""cachesvc beside other servers of the same model on this machine, in interleaved rounds.

    python -m tests.bench.peers --json FILE [--vllm VENV/bin/vllm --model FOLDER]
                                [--llama PATH/llama-server --gguf FILE] [--rounds 3]
                                [--dtype float32] [--threads N] [--start-s 300]
                                [--lengths 1024,2048,4096 | --requests-only]
                                [--ours FOLDER] [--device-cache 1GiB] [--vllm-options TEXT]

Installs nothing: it starts cachesvc and whichever peer it is pointed at, all at once, and asks one
after another the same prompts by token ids. Every figure is the median over the rounds, in
milliseconds or requests a second; `spread` has the least and the most of each. `others` is what
other processes used of the processors meanwhile, as a share of all; where it is more than a few
hundredths, only ratios mean anything, and those only with `--threads 1`: threads that wait for each
other wait for other processes too. `same_answers` compares the greedy texts with cachesvc's.
"""

import argparse
import contextlib
import http.client
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from engine.models.files import DEFAULT_MODEL
from tests.bench.report import arguments, tell
from tests.patience import free_port

LENGTHS = (1024, 2048, 4096)
NEW, DECODED, CACHED = 10, 32, 129
CROWDS = (1, 8, 32)
ANSWER_S = 600.0
JSON = {"content-type": "application/json"}
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Server:
    """One server under test, as a process group of its own."""

    name: str
    command: Sequence[str]
    port: int
    model: str
    start_s: float
    threads: int
    process: "subprocess.Popen[bytes] | None" = None
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=ANSWER_S))

    def start(self, log: Path) -> None:
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                self.command,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
            )
        give_up = time.monotonic() + self.start_s
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > give_up:
                sys.exit(f"{self.name} does not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def cpu_s(self) -> float:
        """CPU time of the processes of its session, of those that live."""
        assert self.process is not None
        used = 0.0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid:
                    used += (int(fields[11]) + int(fields[12])) / TICKS
        return used

    def ask(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[float], str]:
        """When each piece of the answer came, in seconds from the question, and the text."""
        body, url = self.body(prompt, max_tokens), f"{self._url}/v1/completions"
        begun, times, text = time.perf_counter(), [], ""
        with self.client.stream("POST", url, json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line[6:]).get("choices") or [{}]
                if choices[0].get("text"):
                    times.append(time.perf_counter() - begun)
                    text += choices[0]["text"]
        return times or [time.perf_counter() - begun], text

    def body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "cache_prompt": True,  # llama-server's
        }

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _ready(self) -> bool:
        for path in ("/health/ready", "/health"):
            with contextlib.suppress(httpx.HTTPError):
                status = self.client.get(self._url + path).status_code
                if status != 404:
                    return status == 200
        return False


class Rounds:
    """The same questions to every server, in turn; `figures[server][measure]` by round."""

    def __init__(
        self, servers: Sequence[Server], given: argparse.Namespace, words: list[int]
    ) -> None:
        self._servers = servers
        self._lengths = given.lengths
        self._rest_s = given.rest
        self._words = words
        self.figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.others: list[float] = []
        self.same: dict[str, list[bool]] = defaultdict(list)

    def run(self, number: int) -> None:
        for length in self._lengths:
            prompt = self._prompt(number, length)
            cases: dict[str, Callable[[Server], float]] = {
                "cold": lambda server, ids=prompt: server.ask(ids, 1)[0][0] * 1e3,
                "hit": lambda server, ids=prompt: self._hit(server, ids),
                "repeat": lambda server, ids=prompt: server.ask(ids, 1)[0][0] * 1e3,
            }
            for case, measure in cases.items():
                for server in self._servers:
                    self._note(server, f"{case}_{length}_ms", lambda s=server, m=measure: m(s))
            self._decode(prompt, length)
        prompt = self._prompt(1_000 + number, CACHED)
        for crowd in CROWDS:
            for server in self._servers:
                server.ask(prompt, 1)
                self._note(
                    server,
                    f"requests_s_{crowd}",
                    lambda s=server, n=crowd, ids=prompt: _crowd(s, ids, n),
                )

    def _hit(self, server: Server, prompt: list[int]) -> float:
        return server.ask([*prompt, *self._words[:NEW]], 1)[0][0] * 1e3

    def _decode(self, prompt: list[int], length: int) -> None:
        answers = {}
        for server in self._servers:

            def one(server: Server = server) -> float:
                times, answers[server.name] = server.ask(prompt, DECODED)
                return (times[-1] - times[0]) / max(1, len(times) - 1) * 1e3

            self._note(server, f"token_{length}_ms", one)
        ours = answers[self._servers[0].name]
        for server in self._servers[1:]:
            self.same[server.name].append(answers[server.name] == ours)

    def _note(self, server: Server, name: str, measure: Callable[[], float]) -> None:
        time.sleep(self._rest_s)
        begun, (busy, total), own = time.perf_counter(), _processors(), server.cpu_s()
        self.figures[server.name][name].append(measure())
        if time.perf_counter() - begun > 0.2:
            (busy_after, total_after), own_after = _processors(), server.cpu_s()
            spent = busy_after - busy - (own_after - own)
            self.others.append(max(0.0, spent) / max(0.01, total_after - total))

    def _prompt(self, number: int, length: int) -> list[int]:
        """Text that no server has seen before, and that every one reads alike."""
        first = self._words[number % 97 * 3 : number % 97 * 3 + 8]
        words = [*first, 100 + number, 200 + length % 1000, *self._words]
        return (words * (length // len(words) + 1))[:length]


def _crowd(server: Server, prompt: list[int], num_clients: int) -> float:
    """Answers a second to so many clients that ask again and again, each on its connection.

    The client is as thin as the standard library has it: it runs on the same processors. What a
    server drops (llama-server, some connections of 32 at once) is not counted as answered.
    """
    each = max(16, 64 // num_clients)
    body = json.dumps(server.body(prompt, 1)).encode()

    def answered(_: int) -> int:
        count = 0
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)
        for _ in range(each):
            try:
                connection.request("POST", "/v1/completions", body, JSON)
                answer = connection.getresponse()
                count += b"[DONE]" in answer.read() and answer.status == 200
            except (http.client.HTTPException, OSError):
                connection.close()
        connection.close()
        return count

    begun = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as clients:
        num_answered = sum(clients.map(answered, range(num_clients)))
    return num_answered / (time.perf_counter() - begun)


def _processors() -> tuple[float, float]:
    """Busy and all seconds of all processors since the machine started."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    ticks = [int(number) for number in fields]
    total = sum(ticks[:8]) / TICKS
    return total - (ticks[3] + ticks[4]) / TICKS, total


def _servers(given: argparse.Namespace, data_dir: Path) -> Iterator[Server]:
    port, program = free_port(), Path(sys.executable).with_name("cachesvc")
    sizes = ("--device-cache", given.device_cache, "--host-cache", "0", "--disk-cache", "0")
    command = [str(program), "serve", "--port", str(port), "--data-dir", str(data_dir), *sizes]
    command += ["--model", given.ours]
    longest = max([8192, *(2 * length for length in given.lengths)])
    bounds = {"start_s": given.start_s, "threads": given.threads}
    yield Server("cachesvc", [*command, "--dtype", given.dtype], port, given.ours, **bounds)
    if given.vllm:
        port = free_port()
        options = ("--port", str(port), "--dtype", given.dtype, "--max-model-len", str(longest))
        command = [given.vllm, "serve", given.model, *options, *shlex.split(given.vllm_options)]
        yield Server("vllm", command, port, given.model, **bounds)
    if given.llama:
        port = free_port()
        options = ("--port", str(port), "-c", "65536", "-np", "8", "-t", str(given.threads))
        command = [given.llama, "-m", given.gguf, *options]
        yield Server("llama.cpp", command, port, "default", **bounds)


def _words(server: Server) -> list[int]:
    """A page of English as token ids, by the server's own tokenizer."""
    text = (Path(__file__).parents[2] / "docs" / "billing.md").read_text()[:20_000]
    answer = server.client.post(f"http://127.0.0.1:{server.port}/tokenize", json={"prompt": text})
    tokens: list[int] = answer.raise_for_status().json()["tokens"]
    return tokens


def measure(given: argparse.Namespace, data_dir: Path) -> dict[str, Any]:
    servers = list(_servers(given, data_dir))
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start(data_dir / f"{server.name}.log")
        rounds = Rounds(servers, given, _words(servers[0]))
        rounds.run(0)  # to warm them up
        rounds.figures.clear()
        for number in range(1, given.rounds + 1):
            rounds.run(number)
    return {
        "rounds": given.rounds,
        "dtype": given.dtype,
        "threads": given.threads,
        "others": round(statistics.median(rounds.others or [0.0]), 3),
        "same_answers": {n: f"{sum(same)} of {len(same)}" for n, same in rounds.same.items()},
        "servers": {
            name: {case: round(statistics.median(seen), 1) for case, seen in cases.items()}
            for name, cases in rounds.figures.items()
        },
        "spread": {
            name: {case: [round(min(seen), 1), round(max(seen), 1)] for case, seen in cases.items()}
            for name, cases in rounds.figures.items()
        },
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each server")
    parser.add_argument("--start-s", type=float, default=300.0, help="how long one may start")
    # vLLM's workers spin for a second after a request, and take a core from who is next.
    parser.add_argument("--rest", type=float, default=2.0, help="seconds before each measure")
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--requests-only", action="store_true", help="no prompt by itself")
    parser.add_argument("--vllm", help="the vllm program of an environment of its own")
    parser.add_argument("--model", help="the model's folder, for vllm")
    parser.add_argument("--vllm-options", default="", help="what else vllm is told, in one text")
    parser.add_argument("--ours", default=DEFAULT_MODEL, help="the model that cachesvc serves")
    parser.add_argument("--device-cache", default="1GiB", help="of cachesvc; 0: what is free")
    parser.add_argument("--llama", help="llama-server")
    parser.add_argument("--gguf", help="the model's file, for llama-server")
    parser.add_argument("--data-dir", type=Path, help="cachesvc's, kept for its converted model")
    given = parser.parse_args()
    given.lengths = () if given.requests_only else given.lengths or LENGTHS
    if (given.vllm and not given.model) or (given.llama and not given.gguf):
        parser.error("--vllm needs --model, and --llama needs --gguf")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended; its servers are stopped"))
    with tempfile.TemporaryDirectory(prefix="cachesvc-peers-") as folder:
        data_dir = given.data_dir or Path(folder)
        data_dir.mkdir(parents=True, exist_ok=True)
        figures = measure(given, data_dir)
    tell(figures, given.json)


if __name__ == "__main__":
    main()
