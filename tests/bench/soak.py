"""A server under mixed load for as long as you like: its memory, descriptors and threads.

    python -m tests.bench.soak [--seconds 1800] [--json FILE]

`cachesvc serve` on a tiny model with tiny tiers, so that everything turns over many times: chats
and completions, streamed and whole, one choice and several, with grammars and without, by the model
and by its adapter, prompts that share a beginning and prompts that share nothing, and clients that
leave early. What the process
takes is read from /proc every five seconds, and what of it is the heap's.

Expected: everything that is bounded (journal, turns, tiers, pools) is full after some minutes, and
nothing grows from then on.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from billing.money import UNITS
from tests.bench.provenance import commit, machine
from tests.live_server import LiveServer
from tests.support.models import save_tiny_adapter, save_tiny_model

CLIENTS = 12
SAMPLE_S = 5.0
MODELS = ("tiny", "tiny", "tuned")
SHARED = [f"You are assistant number {number}. " * 3 for number in range(8)]
GRAMMARS: list[dict[str, Any]] = [
    {},
    {},
    {"guided_regex": "[a-z]{3,12}"},
    {"response_format": {"type": "json_object"}},
]


def sample(pid: int) -> dict[str, int]:
    """What the process takes now. Memory in kB."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        "resident_kb": int(status["VmRSS"].split()[0]),
        "anonymous_kb": int(status["RssAnon"].split()[0]),
        "threads": int(status["Threads"]),
        "descriptors": sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
    }


def request_of(dice: random.Random) -> dict[str, Any]:
    shared = dice.choice(SHARED) if dice.random() < 0.6 else ""
    text = shared + " ".join(str(dice.randrange(10_000)) for _ in range(dice.randrange(2, 12)))
    body: dict[str, Any] = {"max_tokens": dice.randrange(1, 24), "stream": dice.random() < 0.5}
    if dice.random() < 0.2:
        body |= {"n": dice.choice([2, 3]), "temperature": 1.0, "seed": dice.randrange(99)}
    grammar = dict(dice.choice(GRAMMARS))
    if "guided_regex" in grammar:  # another one each time: the compiler's memory turns over
        grammar["guided_regex"] = f"[a-z]{{2,{dice.randrange(3, 400)}}}"
    return body | grammar | {"messages": [{"role": "user", "content": text}]}


async def client(
    url: str, headers: Mapping[str, str], seed: int, ends: float, seen: Counter[str]
) -> None:
    dice = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
        while time.monotonic() < ends:
            body = request_of(dice) | {"model": dice.choice(MODELS)}
            patience_s = dice.choice([60.0, 60.0, 60.0, dice.random() * 0.3])
            try:
                async with asyncio.timeout(patience_s):
                    answer = await http.post("/v1/chat/completions", json=body)
                seen[str(answer.status_code)] += 1
            except TimeoutError:
                seen["left"] += 1
            except httpx.HTTPError as error:
                seen[type(error).__name__] += 1


async def soak(
    server: LiveServer, headers: Mapping[str, str], seconds: float
) -> tuple[list[dict[str, Any]], Counter[str]]:
    ends, seen, rows = time.monotonic() + seconds, Counter[str](), []
    clients = [
        asyncio.create_task(client(server.url, headers, number, ends, seen))
        for number in range(CLIENTS)
    ]
    began = time.monotonic()
    while time.monotonic() < ends:
        rows.append(
            {"second": round(time.monotonic() - began), "requests": sum(seen.values())}
            | sample(server.pid)
        )
        await asyncio.sleep(SAMPLE_S)
    await asyncio.gather(*clients)
    await asyncio.sleep(1)
    rows.append(
        {"second": round(time.monotonic() - began), "requests": sum(seen.values())}
        | sample(server.pid)
    )
    return rows, seen


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny_model(folder / "tiny")
        save_tiny_adapter(folder / "tuned", r=4, target_modules="all-linear")
        adapters = json.dumps({"tuned": "tuned"})
        server = LiveServer(folder, folder / "tiny", CACHESVC_MODEL__ADAPTERS=adapters)
        headers = server.customer("acme", 10**6 * UNITS)
        server.start()
        try:
            rows, seen = asyncio.run(soak(server, headers, options.seconds))
            server.stop()
        finally:
            with contextlib.suppress(ProcessLookupError):
                server.kill()
        errors = [line for line in server.log.splitlines() if "error" in line.lower()][:5]
    shown = [rows[0], rows[len(rows) // 4], rows[len(rows) // 2], rows[-1]]
    for row in shown:
        print(row)
    print(dict(seen), errors)
    figures = {
        "commit": commit(),
        "machine": machine(),
        "seconds": options.seconds,
        "arenas": os.environ.get("MALLOC_ARENA_MAX", "glibc's own"),
        "answers": dict(seen),
        "start_quarter_middle_end": shown,
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
