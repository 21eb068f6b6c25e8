"""The real server is killed under load, again and again; afterwards nobody paid twice or nothing.

Two kinds of customers: one sends an Idempotency-Key and asks until it has its answer, the other
takes what it gets.
"""

import asyncio
import itertools
import random
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from decimal import Decimal

import httpx
import pytest

from billing.gate.entries import Kind
from billing.gate.outcomes import PRESUMED, Outcome
from billing.money import UNITS
from billing.proof import audit
from billing.store import reports as store_reports
from tests.live_clients import Answer, Incomplete, ask, question
from tests.live_server import ForkedServer
from tests.support.billing import entries_of
from tests.support.models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

CLIENTS = 8  # of each kind
SETTLED = (Outcome.FINISHED, Outcome.CLIENT_GONE)
PAID = 1000 * UNITS
LATER = (409, 503)  # its first request still runs; a slow machine has too much to do


@dataclass
class Load:
    """Clients that ask a server which comes and goes."""

    server: ForkedServer
    keyed_headers: Mapping[str, str]
    plain_headers: Mapping[str, str]
    dice: random.Random
    up: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: bool = False
    keyed: dict[str, Answer] = field(default_factory=dict)  # by idempotency key
    plain: list[Answer] = field(default_factory=list)
    lost: int = 0

    async def ask_until_answered(self, client, number):
        for turn in itertools.count():
            key, body = f"{number}-{turn}", question(self.dice)
            headers = {**self.keyed_headers, "Idempotency-Key": key}
            while key not in self.keyed:
                await self.up.wait()
                try:
                    self.keyed[key] = await ask(client, self.server.url, body, headers)
                except httpx.HTTPStatusError as error:
                    if error.response.status_code not in LATER:
                        raise
                    await asyncio.sleep(0.05)
                except (httpx.HTTPError, Incomplete):
                    self.lost += 1
                    await asyncio.sleep(0.05)
            if self.stopping:
                return

    async def ask_once_each(self, client):
        while not self.stopping:
            await self.up.wait()
            try:
                answer = await ask(client, self.server.url, question(self.dice), self.plain_headers)
                self.plain.append(answer)
            except (httpx.HTTPError, Incomplete):
                self.lost += 1
                await asyncio.sleep(0.05)

    async def run(self, kills):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client, asyncio.TaskGroup() as g:
            for number in range(CLIENTS):
                g.create_task(self.ask_until_answered(client, number))
                g.create_task(self.ask_once_each(client))
            for _ in range(kills):
                await asyncio.to_thread(self.server.start)
                self.up.set()
                await asyncio.sleep(self.dice.uniform(0.3, 1.5))
                self.up.clear()
                self.server.kill()
                assert prove(self.server) == []
            await asyncio.to_thread(self.server.start)
            self.stopping = True
            self.up.set()
        await asyncio.to_thread(self.server.stop)


def prove(server):
    with closing(server.store()) as store:
        return audit.verify(store).problems


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_after_kill_9_under_load_every_answer_was_paid_once(tmp_path, kills):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    save_tiny_model(tmp_path / "tiny")
    at_once = {"CACHESVC_CACHE__WRITE_POLICY": "write_through"}
    server = ForkedServer(tmp_path, tmp_path / "tiny", **at_once)
    keyed, plain = server.customer("keyed", PAID), server.customer("plain", PAID)
    load = Load(server, keyed, plain, random.Random(seed))
    try:
        asyncio.run(load.run(kills))
    finally:
        server.kill()
    assert server.told("ledger", "verify")["ok"]
    blocks = server.told("cache", "verify")
    assert blocks["sound"] and blocks["num_blocks"] > 0
    with closing(server.store()) as store:
        check(store, load)
    print(f"{len(load.keyed)} + {len(load.plain)} answers, {load.lost} lost")
    assert load.lost >= kills


def check(store, load):
    with store.reading() as connection:
        assert store_reports.hold_list(connection) == []
    keyed, plain = (entries_of(store, name) for name in ("keyed", "plain"))
    told = sum((answer.cost for answer in load.keyed.values()), Decimal())
    assert spent(keyed) == told, "somebody with a key paid twice, or nothing"
    charges = [entry for entry in plain if entry.kind is Kind.CHARGE]
    by_request = {entry.request_id: entry for entry in charges}
    assert len(by_request) == len(charges)
    answered = {answer.request_id: answer for answer in load.plain}
    assert len(answered) == len(load.plain)
    assert {name: units(by_request[name]) for name in answered} == {
        name: answer.cost for name, answer in answered.items()
    }
    for name in by_request.keys() - answered:
        assert by_request[name].details["outcome"] in (*PRESUMED, *SETTLED)


def units(entry):
    return Decimal(-entry.amount) / UNITS


def spent(entries):
    return sum((units(entry) for entry in entries if entry.kind is not Kind.TOPUP), Decimal())
