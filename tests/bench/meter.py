"""What the meter costs: a relay before an endpoint that answers at once, beside LiteLLM's proxy.

    python -m tests.bench.meter [--litellm .venv-clients/litellm/bin/litellm] [--json FILE]
    python -m tests.bench.meter --at direct=http://127.0.0.1:8100 --at cachesvc=http://127.0.0.1:8000

A stub streams a chat of 32 tokens without computing anything. Clients ask it directly, through our
relay with a ledger on SQLite, and through LiteLLM's proxy, which counts and books nothing here. The
rounds take turns, so that all three meet the same machine. The gateways have the first processor;
the stub and the clients have the second.

With `--at`, what runs already is asked, say a real vLLM's model `m` and what stands before it.
"""

import asyncio
import json
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from tests.bench.report import arguments, tell
from tests.live_server import LiveServer
from tests.patience import free_port, until_ready
from tests.support.litellm import litellm

TOKENS = 32
ROUNDS = 3
REQUESTS = {1: 200, 32: 800}  # by how many ask at once
ROUNDS_AT = {1: 17, 32: 5}  # of a real engine, which takes its time: a request each
OPEN_STREAMS = 2000
BEGIN_S = 30.0
BODY = {
    "model": "m",
    "stream": True,
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": "Say something. " * 20}],
}
USAGE = {"prompt_tokens": 70, "completion_tokens": TOKENS, "total_tokens": 70 + TOKENS}
USAGE_CHUNK: dict[str, Any] = USAGE | {"prompt_tokens_details": {"cached_tokens": 64}}


def chunk(choices: Sequence[Any], **more: Any) -> bytes:
    told = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return b"data: " + json.dumps(told | {"choices": choices} | more).encode() + b"\n\n"


TEXT = re.compile(rb'"content": ?"[^"]')
COUNTED = b'"completion_tokens":%d' % TOKENS
TOKEN = chunk([{"index": 0, "delta": {"role": "assistant", "content": "word "}}])
END = chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}])
ANSWER = TOKEN * TOKENS + END + chunk([], usage=USAGE_CHUNK) + b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}).encode()


async def stub(port: int) -> None:
    """Answers a request at once; one whose body says "hold" gets a token, and then waits."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        except asyncio.IncompleteReadError:  # somebody looked whether we listen
            writer.close()
            return
        length = [line for line in head.split("\r\n") if line.startswith("content-length:")]
        body = await reader.readexactly(int(length[0].split(":")[1])) if length else b""
        if head.startswith("get"):
            kind = b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
            writer.write(b"HTTP/1.1 200 OK\r\n%b%d\r\n\r\n%b" % (kind, len(MODELS), MODELS))
        elif b'"hold' in body:
            writer.write(HEAD + TOKEN)
            await reader.read()  # until whoever asked has gone
        else:
            writer.write(HEAD + ANSWER)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


class Relay(LiveServer):
    """Ours, before the stub."""

    sizes = ()

    def command(self) -> list[Any]:
        return ["taskset", "-c", "0", *super().command()]


async def ask(session: aiohttp.ClientSession, url: str) -> tuple[float, float]:
    """Milliseconds to the first text and to the end."""
    began, first = time.perf_counter(), 0.0
    async with session.post(f"{url}/v1/chat/completions", json=BODY) as answer:
        assert answer.status == 200, await answer.text()
        data = b""
        async for part in answer.content.iter_any():
            data += part
            first = first or (time.perf_counter() if TEXT.search(data) else 0.0)
    assert COUNTED in data.replace(b" ", b""), data[-500:]
    return 1e3 * (first - began), 1e3 * (time.perf_counter() - began)


async def load(url: str, at_once: int, number: int) -> dict[str, float]:
    """Medians of one round, and requests a second."""
    timed: list[tuple[float, float]] = []
    left = iter(range(number))

    async def client(session: aiohttp.ClientSession) -> None:
        for _ in left:
            timed.append(await ask(session, url))

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await ask(session, url)
        began = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(at_once)))
        took = time.perf_counter() - began
    firsts, ends = zip(*timed, strict=True)
    return {
        "first_ms": round(statistics.median(firsts), 2),
        "token_ms": round(statistics.median((b - a) / (TOKENS - 1) for a, b in timed), 3),
        "whole_ms": round(statistics.median(ends), 2),
        "requests_s": round(len(timed) / took, 1),
    }


async def hold_open(url: str, number: int) -> dict[str, float]:
    """How many streams were open at once, and the MiB that they take of what listens at the URL.

    Gives up where the next hundred do not begin in time.
    """
    port = int(url.rpartition(":")[2])
    before = resident_mib(port)
    body = BODY | {"messages": [{"role": "user", "content": "hold " * 20}]}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        answers: list[aiohttp.ClientResponse] = []
        while len(answers) < number:
            asked = (session.post(f"{url}/v1/chat/completions", json=body) for _ in range(100))
            try:
                async with asyncio.timeout(BEGIN_S):
                    answers += await asyncio.gather(*asked)
            except TimeoutError:
                break
        assert all(answer.status == 200 for answer in answers)
        await asyncio.gather(*(answer.content.readany() for answer in answers))
        after = resident_mib(port)
        for answer in answers:
            answer.close()
    return {"streams": len(answers), "mib": round(after - before, 1)}


def resident_mib(port: int) -> float:
    """Of the process that listens on the port, as the kernel has it."""
    found = subprocess.run(
        ["ss", "-ltnpH", f"sport = :{port}"], capture_output=True, text=True, check=True
    ).stdout
    pid = found.partition("pid=")[2].partition(",")[0]
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def by_turns(urls: Mapping[str, str], requests: Mapping[int, int], rounds: int) -> dict[str, Any]:
    """Rounds by name: figures by how many asked at once. Each round begins with another name."""
    found: dict[str, Any] = {name: [] for name in urls}
    names = list(urls)
    for turn in range(rounds):
        for who in names[turn % len(names) :] + names[: turn % len(names)]:
            found[who].append({n: asyncio.run(load(urls[who], n, requests[n])) for n in requests})
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--litellm", type=Path, help="the program of LiteLLM's proxy")
    parser.add_argument("--at", action="append", metavar="NAME=URL", help="ask these, not a stub")
    parser.add_argument("--stub", type=int, help=SUPPRESS)
    options = parser.parse_args()
    if options.stub:
        asyncio.run(stub(options.stub))
        return
    if options.at:
        urls = dict(each.split("=") for each in options.at)
        found = {n: by_turns(urls, {n: n}, rounds) for n, rounds in ROUNDS_AT.items()}
        tell({"rounds": found}, options.json)
        return
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 20_000)), hard))
    with ExitStack() as stack, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        upstream = f"http://127.0.0.1:{(port := free_port())}"
        endpoint = subprocess.Popen([sys.executable, "-m", __spec__.name, "--stub", str(port)])
        stack.callback(endpoint.wait)
        stack.callback(endpoint.kill)
        there, log = ("127.0.0.1", port), folder / "stub.log"
        until_ready(lambda: socket.create_connection(there, 1).close(), endpoint, log, OSError)
        relay = Relay(folder, folder / "m", CACHESVC_ENGINE__MAX_WAITING="4096")
        relay.more = ("--engine", f"openai+{upstream}")
        stack.callback(relay.kill)
        urls = {"direct": upstream, "cachesvc": relay.start()}
        if options.litellm:
            urls["litellm"] = stack.enter_context(
                litellm(options.litellm, upstream, folder, "m", "taskset", "-c", "0")
            )
        rounds = by_turns(urls, REQUESTS, ROUNDS)
        held = {
            who: asyncio.run(hold_open(url, OPEN_STREAMS))
            for who, url in urls.items()
            if who != "direct"
        }
        tell({"rounds": rounds, "open": held}, options.json)


if __name__ == "__main__":
    main()
