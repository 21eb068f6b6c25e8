"""What a request costs outside the engine: who asks, parse, tokenise, hold, settle, answer.

    python -m tests.bench.request [--requests 300] [--concurrency 1 8] [--json FILE]

The application and the ledger on SQLite are the real ones, in one process over ASGI. The tokenizer
is one of bytes, and the engine answers each request with one token at once. Each stage is timed on
the event loop, and the whole by the wall clock and by the process's CPU time. On a shared machine
only the shares of the stages mean something, and the CPU time.

Expected: two commits on SQLite, 0.3 ms each, of which the settlement's waits for the disk's sync;
pydantic 0.1; the framework 0.5; nothing to learn who asks. Under 4 ms in all.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import structlog

from api.access.auth import KeyGate
from api.app import create_app
from api.requests.metering import LedgerCharge, LedgerMeter
from api.routes import chat, conversation
from billing.money import UNITS
from tests.api.bank import CHAT, Bank
from tests.api.driver import Visit
from tests.bench.provenance import commit, machine
from tests.support.wire import Script

WORDS = "the quick brown fox jumps over the lazy dog and runs far away from here " * 8


class Stages:
    """Wall time by stage, between a call and its return."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if asyncio.iscoroutinefunction(function):

            async def awaited(*args: Any, **named: Any) -> Any:
                began = time.perf_counter()
                try:
                    return await function(*args, **named)
                finally:
                    self.seconds[name].append(time.perf_counter() - began)

            return awaited

        def called(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                self.seconds[name].append(time.perf_counter() - began)

        return called

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        watched = {
            "who asks": (KeyGate, "identify"),
            "parse": (chat, "parse"),
            "tokenise": (conversation, "encode_chat"),
            "hold": (LedgerMeter, "admit"),
            "settle": (LedgerCharge, "settle"),
        }
        kept = {name: getattr(owner, attr) for name, (owner, attr) in watched.items()}
        for name, (owner, attr) in watched.items():
            setattr(owner, attr, self.timed(name, kept[name]))
        try:
            yield
        finally:
            for name, (owner, attr) in watched.items():
                setattr(owner, attr, kept[name])


async def run(requests: int, concurrency: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        bank = Bank(Path(folder), slice_tokens=256)
        headers = bank.customer(10**6 * UNITS)
        bank.house.engine.script = Script(answer="", hits={"hit_device": 128})
        app = create_app(bank.house.wire)
        body = {"model": "bytes", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 1}
        stages, walls = Stages(), []

        async def client(number: int) -> None:
            for _ in range(number):
                began = time.perf_counter()
                visit = Visit(app, CHAT, body, **headers).start()
                await visit.task
                walls.append(time.perf_counter() - began)
                assert visit.messages[0]["status"] == 200, visit.text

        async with app.router.lifespan_context(app):
            await client(20)
            walls.clear()
            with stages.watching():
                cpu, began = time.process_time(), time.perf_counter()
                await asyncio.gather(*(client(requests // concurrency) for _ in range(concurrency)))
                cpu, wall = time.process_time() - cpu, time.perf_counter() - began
        bank.house.close()
        bank.close()
    done = len(walls)
    told = {name: round(1e3 * statistics.median(s), 3) for name, s in stages.seconds.items()}
    whole = 1e3 * statistics.median(walls)
    return {
        "concurrency": concurrency,
        "requests": done,
        "wall_ms_p50": round(whole, 3),
        "cpu_ms": round(1e3 * cpu / done, 3),
        "requests_per_s": round(done / wall, 1),
        "stages_ms_p50": told,
        "shares": {name: round(ms / whole, 3) for name, ms in told.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    quiet = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(wrapper_class=quiet)
    rows = [asyncio.run(run(options.requests, many)) for many in options.concurrency]
    for row in rows:
        print(json.dumps(row))
    figures = {"commit": commit(), "machine": machine(), "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
