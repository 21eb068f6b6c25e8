"""Clients of the real server that leave when they like: every token the engine counted was billed
once, and no other.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from billing.gate.entries import Kind
from billing.gate.outcomes import Outcome
from billing.money import UNITS
from billing.store import reports as store_reports
from tests.live_clients import Incomplete, ask, question
from tests.live_server import ForkedServer
from tests.support.models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

CLIENTS, TURNS = 24, 8
SOURCES = {
    "hit_device": "device",
    "hit_host": "host",
    "hit_disk": "disk",
    "hit_remote": "remote",
    "miss": "computed",
}


Served = tuple[ForkedServer, Mapping[str, str]]  # and its customer's key


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    save_tiny_model(folder / "tiny")
    server = ForkedServer(folder, folder / "tiny")
    headers = server.customer("acme", 1000 * UNITS)
    server.start()
    try:
        yield server, headers
        server.stop()
    finally:
        server.kill()


async def come_and_go(server: ForkedServer, headers: Mapping[str, str], seed: int) -> Counter[str]:
    """What became of each visit, as the client saw it."""
    seen: Counter[str] = Counter()

    async def visit(client: httpx.AsyncClient, dice: random.Random) -> None:
        for _ in range(TURNS):
            asked = ask(client, server.url, question(dice, max_tokens=80), headers)
            patience_s = dice.choice([100.0, dice.random() ** 2 * 2])
            try:
                await asyncio.wait_for(asked, patience_s)
                seen["answered"] += 1
            except TimeoutError:
                seen["left" if patience_s < 100 else "stuck"] += 1
            except Incomplete:
                seen["incomplete"] += 1

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        dice = [random.Random(seed * 1000 + number) for number in range(CLIENTS)]
        await asyncio.gather(*(visit(client, each) for each in dice))
    return seen


def metrics(server: ForkedServer) -> dict[tuple[str, str], float]:
    """Samples by name and their only label's value."""
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def wait_until_quiet(server: ForkedServer) -> dict[tuple[str, str], float]:
    """The metrics once nothing runs and everything is settled."""
    deadline = time.monotonic() + 30
    while True:
        now = metrics(server)
        store = server.store()
        with store.reading() as connection:
            open_holds = store_reports.hold_list(connection)
        store.close()
        busy = [now["cachesvc_running_requests", ""], now["cachesvc_waiting_requests", ""]]
        if not any(busy) and not open_holds:
            return metrics(server)
        assert time.monotonic() < deadline, (busy, open_holds)
        time.sleep(0.05)


def test_what_was_billed_is_what_the_engine_counted(served: Served) -> None:
    server, key = served
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    seen = asyncio.run(come_and_go(server, key, seed))
    assert 0 == seen["stuck"], seen
    counted = wait_until_quiet(server)
    store = server.store()
    with store.reading() as connection:
        entries = list(store_reports.stream_entries(connection, "acme"))
    store.close()
    charges = [entry for entry in entries if entry.kind is Kind.CHARGE]
    outcomes = Counter(entry.details["outcome"] for entry in charges)
    billed: Counter[str] = Counter()
    for entry in charges:
        billed.update(entry.details.get("usage", {}))
    print(f"{dict(seen)} seen, {dict(outcomes)} charged, {dict(billed)} tokens")

    engine = {
        name: counted.get(("cachesvc_prompt_tokens_total", source), 0)
        for name, source in SOURCES.items()
    }
    assert {name: billed[name] for name in SOURCES} == engine
    assert billed["output"] == counted["cachesvc_generation_tokens_total", ""]
    assert outcomes.keys() <= {Outcome.FINISHED, Outcome.CLIENT_GONE}
    assert outcomes[Outcome.FINISHED] >= seen["answered"] > 0
    assert outcomes[Outcome.CLIENT_GONE] > 0
    assert server.told("ledger", "verify")["ok"]
    (told,) = (row for row in server.told("usage") if row["tenant"] == "acme")
    assert told["output_tokens"] == billed["output"]
    assert told["prompt_tokens"] == sum(billed[name] for name in SOURCES)
