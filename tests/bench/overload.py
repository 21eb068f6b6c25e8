"""What a server answers when more is asked of it than it can serve: goodput, p99, a polite tenant.

    python -m tests.bench.overload [--seconds 30]
    python -m tests.bench.overload --modes model --seconds 50    # 6 minutes

The HTTP server, the wire and the engine with its scheduler and cache are the real ones; the model
is a runner that takes a declared time for each step, so that the load is a multiple of a known
capacity and the sweep does not depend on what else the machine does. Two tenants ask, each at
random moments: the storm at a multiple of the capacity, the polite one at a tenth of it. Nobody
asks again when refused. `unbounded` is the same server without refusal and with one share for all.
`model` is `cachesvc serve` with the default model and its bill; what it can serve is measured
first, with as many clients as it runs at once.

Expected: a request is 256 prompt tokens at 4,000/s, that is 64 ms, and 8 steps of 4 ms that all
running sequences share, so about 13 requests a second. Bounded, goodput stays there and the storm
waits for at most `engine.max_wait`; the polite tenant's prompts pass the storm's, but its decode
steps carry their chunks. Unbounded, everybody's wait grows until clients give up.
"""

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from api.access.overload import QueueBound
from api.app import create_app
from api.requests.bridge import OutputBridge
from billing.keys import Principal, Scope
from billing.money import UNITS
from cachesvc.server.connection import BoundedConnection
from engine.batch import Batch, Sampled
from engine.engine import Engine
from engine.scheduling.settings import SchedulerSettings
from engine.settings import EngineSettings
from tests.bench.report import arguments, tell
from tests.live_server import SCRIPT, LiveServer
from tests.support.chain_runner import ChainRunner, chain_layout
from tests.support.wire import byte_model, fake_house
from tiers.cache import CacheSettings, TieredCache

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 8
PREFILL_TOKENS_PER_S, STEP_S = 4_000, 0.004
MAX_RUNNING, CHUNK_TOKENS, MIXED_TOKENS = 8, 256, 64
CAPACITY = 12.0  # requests a second, a little below what the sweep finds
POLITE = 0.1  # of the capacity
FACTORS = {
    "bounded": (0.0, 0.5, 1, 2, 3, 5, 7, 10),
    "unbounded": (0.0, 1, 2, 5, 10),
    "model": (0.0, 1, 2, 5, 10),
}
TENANTS = ("storm", "polite")
MODEL_CAPACITY_S = 15.0  # of measuring what the default model can serve
MAX_WAIT_S = 2.0
PATIENCE_S = 20.0  # a client gives up, and its answer is no goodput


class PacedRunner(ChainRunner):
    """Takes the declared time for each step."""

    def step(self, batch: Batch) -> list[Sampled]:
        began = time.perf_counter()
        sampled = super().step(batch)
        prefill = sum(len(span.tokens) for span in batch.spans if len(span.tokens) > 1)
        left_s = STEP_S + prefill / PREFILL_TOKENS_PER_S - (time.perf_counter() - began)
        time.sleep(max(0.0, left_s))
        return sampled


@dataclass(frozen=True, slots=True)
class Tenants:
    """A gate that takes the key for the tenant's name. Unbounded, all are one share."""

    bounded: bool

    async def identify(self, authorization: str | None) -> Principal:
        name = (authorization or "").removeprefix("Bearer ")
        return Principal(name if self.bounded else "all", key_id="key", scopes=frozenset(Scope))


def serve(port: int, *, bounded: bool) -> None:
    layout = chain_layout(16)
    cache = TieredCache(layout, CacheSettings(device_bytes=4096 * layout.nbytes, host_bytes=0))
    bridge = OutputBridge()
    engine = Engine(
        PacedRunner(cache.pool.tensor),
        cache,
        EngineSettings(
            scheduler=SchedulerSettings(
                max_running=MAX_RUNNING, step_tokens=CHUNK_TOKENS, mixed_step_tokens=MIXED_TOKENS
            ),
            max_waiting=1 << 20,
        ),
        bridge.deliver,
    )
    house = fake_house(gatekeeper=Tenants(bounded), models=[byte_model()])
    house.engine.close()
    bound = QueueBound(
        engine,
        max_wait_s=MAX_WAIT_S if bounded else math.inf,
        max_in_flight=1024 if bounded else 1 << 20,
    )
    wire = replace(
        house.wire,
        access=replace(house.wire.access, queue=bound),
        inference=replace(house.wire.inference, engine=engine, bridge=bridge),
    )
    app = create_app(wire)
    engine.start()
    uvicorn.run(app, port=port, loop="uvloop", http=BoundedConnection, log_config=None)


@dataclass(frozen=True, slots=True)
class Served:
    """A server, how each tenant shows who it is, and what it can serve."""

    url: str
    model: str = "bytes"
    vocabulary: int = 256
    capacity: float = CAPACITY
    keys: Mapping[str, str] = field(
        default_factory=lambda: {tenant: f"Bearer {tenant}" for tenant in TENANTS}
    )


@contextmanager
def served(port: int, *, bounded: bool) -> Iterator[Served]:
    """A server in a process of its own."""
    mode = "bounded" if bounded else "unbounded"
    command = [sys.executable, "-m", "tests.bench.overload", "--serve", mode, "--port", str(port)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.HTTPError:
                assert child.poll() is None, "the server did not start"
                time.sleep(0.1)
        yield Served(url)
    finally:
        child.kill()
        child.wait()


class DefaultServer(LiveServer):
    """The default model, whose prompts do not fit the cache for long."""

    def command(self) -> list[Any]:
        sizes = ("--device-cache", "512MiB", "--host-cache", "64MiB", "--disk-cache", "0")
        return [SCRIPT, "serve", "--port", "0", "--data-dir", self.data_dir, *sizes]


@contextmanager
def served_model() -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as name:
        server = DefaultServer(
            Path(name), Path(name) / "unused", CACHESVC_ENGINE__MAX_WAIT=f"{MAX_WAIT_S}s"
        )
        keys = {
            tenant: server.customer(tenant, 10**6 * UNITS)["Authorization"] for tenant in TENANTS
        }
        url = server.start()
        try:
            models = httpx.get(f"{url}/v1/models", headers={"Authorization": keys["storm"]}).json()
            found = Served(url, models["data"][0]["id"], 40_000, keys=keys)
            rate = asyncio.run(capacity_of(found))
            print(f"{found.model} serves {rate:.2f} requests a second", flush=True)
            yield replace(found, capacity=rate)
        finally:
            server.kill()


async def capacity_of(server: Served) -> float:
    """Requests a second with `MAX_RUNNING` clients that ask again at once."""
    got = Answers(0, [], [], 0)
    ends = time.perf_counter() + MODEL_CAPACITY_S
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:

        async def keep_asking(number: int) -> None:
            dice = random.Random(f"capacity {number}")
            while time.perf_counter() < ends:
                await ask(client, server, "storm", dice, got)

        began = time.perf_counter()
        await asyncio.gather(*(keep_asking(number) for number in range(MAX_RUNNING)))
    return len(got.seconds) / (time.perf_counter() - began)


@dataclass(slots=True)
class Answers:
    """What one tenant got."""

    asked: int
    seconds: list[float]  # of whole answers
    refused: list[float]
    given_up: int

    def summary(self, span_s: float) -> dict[str, Any]:
        return {
            "asked_per_s": round(self.asked / span_s, 2),
            "answered_per_s": round(len(self.seconds) / span_s, 2),
            "refused": len(self.refused),
            "given_up": self.given_up,
            "p50_s": quantile(self.seconds, 0.5),
            "p99_s": quantile(self.seconds, 0.99),
            "refusal_p99_s": quantile(self.refused, 0.99),
        }


def quantile(values: list[float], share: float) -> float | None:
    ordered = sorted(values)
    return round(ordered[int(share * (len(ordered) - 1))], 3) if ordered else None


async def ask(
    client: httpx.AsyncClient, server: Served, tenant: str, dice: random.Random, into: Answers
) -> None:
    tokens = [dice.randrange(server.vocabulary) for _ in range(PROMPT_TOKENS)]
    body = {"model": server.model, "prompt": tokens, "max_tokens": OUTPUT_TOKENS}
    headers = {"Authorization": server.keys[tenant]}
    began = time.perf_counter()
    try:
        answer = await client.post("/v1/completions", json=body, headers=headers)
    except httpx.TimeoutException:
        into.given_up += 1
        return
    elapsed = time.perf_counter() - began
    (into.seconds if answer.status_code == 200 else into.refused).append(elapsed)
    assert answer.status_code in (200, 503), answer.text


async def offer(
    server: Served, rates: Mapping[str, float], seconds: float, *, seed: str
) -> dict[str, Answers]:
    """Each tenant asks at random moments, at its rate; answered when all have ended."""
    got = {tenant: Answers(0, [], [], 0) for tenant in rates}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=limits) as client:

        async def tenant(name: str, rate: float) -> None:
            dice, tasks = random.Random(seed + name), []
            ends = time.perf_counter() + seconds
            while rate and time.perf_counter() < ends:
                tasks.append(asyncio.create_task(ask(client, server, name, dice, got[name])))
                got[name].asked += 1
                left_s = ends - time.perf_counter()
                await asyncio.sleep(min(dice.expovariate(rate), max(0.0, left_s)))
            await asyncio.gather(*tasks)

        await asyncio.gather(*(tenant(name, rate) for name, rate in rates.items()))
    return got


def measure(server: Served, factor: float, seconds: float) -> dict[str, Any]:
    rates = {"storm": factor * server.capacity, "polite": POLITE * server.capacity}
    asyncio.run(
        offer(server, rates, min(5.0, seconds), seed=f"before {factor} ")
    )  # the rate that waits are predicted from
    time.sleep(MAX_WAIT_S)
    began = time.perf_counter()
    got = asyncio.run(offer(server, rates, seconds, seed=f"measured {factor} "))
    span_s = time.perf_counter() - began
    goodput = sum(len(answers.seconds) for answers in got.values()) / max(span_s, seconds)
    row = {name: answers.summary(seconds) for name, answers in got.items()}
    return {"load": factor, "goodput_per_s": round(goodput, 2), **row}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    parser.add_argument("--port", type=int, default=18431)
    parser.add_argument("--serve", choices=["bounded", "unbounded"], help=argparse.SUPPRESS)
    parser.add_argument("--modes", nargs="+", choices=FACTORS, default=["bounded", "unbounded"])
    options = parser.parse_args()
    if options.serve:
        serve(options.port, bounded=options.serve == "bounded")
        return
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in options.modes}
    for mode in options.modes:
        bounded = mode == "bounded"
        with served_model() if mode == "model" else served(options.port, bounded=bounded) as server:
            for factor in FACTORS[mode]:
                runs[mode].append(measure(server, factor, options.seconds))
                print(mode, json.dumps(runs[mode][-1]), flush=True)
    figures = {
        "note": "the machine was shared; the model's time is declared, not computed",
        "declared": {
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "prefill_tokens_per_s": PREFILL_TOKENS_PER_S,
            "step_s": STEP_S,
            "max_running": MAX_RUNNING,
            "load_1_per_s": CAPACITY,
            "max_wait_s": MAX_WAIT_S,
        },
        "seconds": options.seconds,
        "runs": runs,
    }
    tell(figures, options.json)
    for mode, rows in runs.items():
        peak = max(row["goodput_per_s"] for row in rows)
        quiet, last = rows[0]["polite"]["p99_s"], rows[-1]
        print(
            f"{mode}: at {last['load']}x goodput {last['goodput_per_s'] / peak:.0%} of its peak, "
            f"the polite tenant's p99 {(last['polite']['p99_s'] or math.inf) / quiet:.1f} x quiet"
        )


if __name__ == "__main__":
    main()
