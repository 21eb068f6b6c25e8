"""A relay in a process of its own under load: it is killed, or its endpoint is, again and again.

Clients of all four protocols ask, streamed or not, and some of them leave. Afterwards every request
was settled once, nothing is held, and the ledger is proved.
"""

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import httpx
import pytest

from billing.gate.entries import Entry
from billing.gate.outcomes import PRESUMED, Outcome
from billing.money import UNITS
from billing.store import reports
from tests.api.relaying import ALL, usage_of
from tests.children import start_child
from tests.live_server import ForkedServer
from tests.patience import PATIENCE_S, free_port
from tests.support.billing import charges_of
from tests.support.upstream import PATHS, STREAMS, WHOLE, UpstreamServer, body, compact, joined

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3 * 3600)]

CLIENTS = 32
KILLS = 2
MINUTES = float(os.environ.get("RELAY_MINUTES", "60"))  # of the soak
KILL_EVERY_S = 60.0
GROWN_MIB = 48  # at most, from the first third of a soak to its end


def answer_slowly(port: int) -> None:
    """An endpoint that takes a while for each event."""

    class Endpoint(UpstreamServer):
        request_queue_size = 256

        def server_bind(self) -> None:
            self.server_address = ("127.0.0.1", port)
            super().server_bind()

    with Endpoint(owned_by="openai") as server:
        for path, parts in STREAMS.items():
            events = [each for part in parts for each in part]
            server.script[path] = [step for each in events for step in (0.1, each)]
            server.whole[path] = [0.5, compact(WHOLE[path])]
        server.serve_forever()


class Relay(ForkedServer):
    sizes = ()

    @property
    def mib(self) -> float:
        """Its memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024


@dataclass
class Load:
    relay: Relay
    port: int  # of the endpoint
    headers: Mapping[str, str]
    dice: random.Random
    up: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: bool = False
    whole: set[str] = field(default_factory=set)  # requests whose answer came to its last byte
    seen: Counter[str] = field(default_factory=Counter)

    async def ask(self, client: httpx.AsyncClient) -> None:
        while not self.stopping:
            await self.up.wait()
            path, stream = self.dice.choice(PATHS), self.dice.random() < 0.7
            asked = body(path, stream=stream, stream_options={"include_usage": True})
            most = self.dice.randrange(400) if self.dice.random() < 0.1 else None
            try:
                await self._one(client, path, asked, most)
            except httpx.HTTPError:
                self.seen["lost"] += 1
                await asyncio.sleep(0.05)

    async def _one(
        self, client: httpx.AsyncClient, path: str, asked: dict[str, Any], most: int | None
    ) -> None:
        url, said = f"{self.relay.url}{path}", b""
        async with client.stream("POST", url, json=asked, headers=self.headers) as answer:
            async for part in answer.aiter_raw():
                said += part
                if most is not None and len(said) > most:
                    self.seen["left"] += 1
                    return
        # An endpoint that dies after its usage has said all but the close.
        wanted = [joined(each for part in STREAMS[path][:n] for each in part) for n in (4, 5)]
        if said in (wanted if asked["stream"] else [compact(WHOLE[path])]):
            assert answer.status_code == 200
            self.whole.add(answer.headers["x-request-id"])
            self.seen[path] += 1
        else:
            assert answer.status_code >= 500 or b'"error"' in said, said
            self.seen[f"failed {answer.status_code}"] += 1
            await asyncio.sleep(0.05)


def check(load: Load) -> None:
    """Every answer that came was paid, once and in full. Nothing else is held or owed."""
    relay = load.relay
    assert relay.told("ledger", "verify")["ok"]
    with closing(relay.store()) as store, store.reading() as connection:
        assert [] == reports.hold_list(connection)
        charges = charges_of(store)
    by_request = {entry.request_id: entry for entry in charges}
    assert len(by_request) == len(charges)
    assert load.whole <= by_request.keys()
    for name, entry in by_request.items():
        assert name not in load.whole or usage_of(entry) == ALL, "an answer that came whole"
        _check_one(entry)
    print(f"{len(charges)} charges, {dict(load.seen)}")


def _check_one(entry: Entry) -> None:
    usage, outcome = usage_of(entry), entry.details["outcome"]
    assert outcome in (*PRESUMED, Outcome.FINISHED, Outcome.CLIENT_GONE, Outcome.FAILED)
    if outcome == Outcome.FINISHED:
        assert usage == ALL
    elif outcome != Outcome.CLIENT_GONE:
        assert not usage or usage["output"], "a failure before the text costs nothing"
    assert usage.get("unreported", 0) in (0, usage.get("miss", 0))
    assert entry.amount or not usage


@pytest.fixture
def load(tmp_path):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    relay = Relay(tmp_path, tmp_path / "up")
    port = free_port()
    relay.more = ("--engine", f"openai+http://127.0.0.1:{port}")
    headers = relay.customer("acme", 10**6 * UNITS)
    yield Load(relay, port, headers, random.Random(seed))
    relay.kill()


async def endpoint(port: int) -> ForkServerProcess:
    """A child that answers there."""
    child = start_child(answer_slowly, port)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
            except OSError:
                await asyncio.sleep(0.02)
            else:
                return child


async def under(load: Load, work: Callable[[Load], Awaitable[None]]) -> None:
    """Does `work` while clients ask; then lets them end, and stops the relay."""
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(CLIENTS):
            group.create_task(load.ask(client))
        await work(load)
        load.stopping = True
        load.up.set()
    await asyncio.to_thread(load.relay.stop)


async def answers(load: Load, num: int) -> None:
    """Waits for so many more."""
    enough = len(load.whole) + num
    async with asyncio.timeout(PATIENCE_S):
        while len(load.whole) < enough:
            await asyncio.sleep(0.01)


async def kill_the_relay(load: Load) -> None:
    child = await endpoint(load.port)
    for _ in range(KILLS):
        await asyncio.to_thread(load.relay.start)
        load.up.set()
        await answers(load, load.dice.randrange(5, 50))
        load.up.clear()
        load.relay.kill()
    await asyncio.to_thread(load.relay.start)
    load.up.set()
    await answers(load, 1)
    child.kill()


def test_a_relay_that_is_killed_settles_every_request_once(load):
    asyncio.run(under(load, kill_the_relay))
    assert load.seen["lost"] and load.whole
    check(load)


async def kill_the_endpoint(load: Load) -> None:
    """Notes the relay's memory each time, and that it passes requests again."""
    loop, child = asyncio.get_running_loop(), await endpoint(load.port)
    await asyncio.to_thread(load.relay.start)
    load.up.set()
    end, noted = loop.time() + 60 * MINUTES, list[float]()
    while (left := end - loop.time()) > 0:
        await asyncio.sleep(min(KILL_EVERY_S, left))
        noted.append(load.relay.mib)
        child.kill()
        await asyncio.to_thread(child.join)
        child = await endpoint(load.port)
        await answers(load, 1)
    print("MiB:", json.dumps([round(each) for each in noted]))
    assert noted[-1] < noted[len(noted) // 3] + GROWN_MIB
    child.kill()


@pytest.mark.slow
def test_a_relay_whose_endpoint_dies_every_minute_keeps_its_memory_and_its_books(load):
    asyncio.run(under(load, kill_the_endpoint))
    assert load.seen["failed 200"] and load.seen["failed 503"] and load.seen["left"]
    check(load)
