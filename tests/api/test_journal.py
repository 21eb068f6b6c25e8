"""The journal: what it keeps of a request, for whom, and how much of it."""

import asyncio
from dataclasses import dataclass

import httpx
from fastapi import FastAPI

from api.journal.journal import Journal, JournalSettings, RequestRecord, State
from billing.gate.work import insufficient_balance
from billing.keys import Principal, Scope
from tests.api.conftest import quiet, running
from tests.api.driver import Visit
from tests.support.wire import FakeHouse, OpenGate, Script, fake_house

CHAT = "/v1/chat/completions"
SECRET = "never to be kept"
HELLO = {"model": "bytes", "messages": [{"role": "user", "content": SECRET}]}


@dataclass
class NamedGate:
    """Whoever asks is the tenant that the Authorization header names."""

    async def identify(self, authorization: str | None) -> Principal:
        return Principal(authorization or "default", scopes=frozenset(Scope))


async def test_a_finished_request_is_reported_in_full(
    house: FakeHouse, client: httpx.AsyncClient
) -> None:
    house.engine.script = Script(hits={"hit_disk": 10})
    answer = (await client.post(CHAT, json=HELLO)).json()
    told = (await client.get(f"/v1/cache/requests/{answer['id']}")).json()
    assert answer["id"] == f"chatcmpl-{told['id']}"
    assert answer["usage"] == told["usage"]
    assert ("finished", "finished", ["stop"]) == (
        told["state"],
        told["outcome"],
        told["finish_reasons"],
    )
    assert ("0.000012", "CNY") == (told["bill"]["amount"], told["bill"]["currency"])
    assert {"queue", "load", "prefill", "decode", "ttft", "total"} <= told["timings_ms"].keys()
    assert told["delivered"] is True


async def test_neither_prompt_nor_answer_is_kept(
    house: FakeHouse, client: httpx.AsyncClient
) -> None:
    await client.post(CHAT, json=HELLO)
    record = next(house.wire.records.journal.newest())
    assert SECRET not in repr(record) and record.prompts == ()


def _has_said(record: RequestRecord, words: str) -> bool:
    return record.served is not None and record.served.usage.output > len(words)


async def test_a_running_request_shows_nothing_that_was_said(
    house: FakeHouse, app: FastAPI
) -> None:
    house.engine.script = Script(answer=SECRET * 40, step_s=0.005)
    visit = Visit(app, CHAT, HELLO | {"stream": True}).start()
    async with asyncio.timeout(30):
        while not (said := next(house.wire.records.journal.newest(), None)) or not _has_said(
            said, SECRET
        ):
            await asyncio.sleep(0.005)
    assert said.state is State.RUNNING and SECRET not in repr(said)
    visit.leave()
    await visit.task
    await quiet(house, app)


async def test_prompts_are_kept_where_the_operator_says_so() -> None:
    house = fake_house(journal=Journal(JournalSettings(keep_prompts=True)))
    async with running(house) as (_, client):
        await client.post(CHAT, json=HELLO)
        (tokens,) = next(house.wire.records.journal.newest()).prompts
        assert SECRET in bytes(tokens.tolist()).decode()


async def test_a_request_is_found_by_the_clients_own_id(client: httpx.AsyncClient) -> None:
    await client.post(CHAT, json=HELLO, headers={"X-Request-Id": "mine-1"})
    told = await client.get("/v1/cache/requests/mine-1")
    assert "mine-1" == told.json()["client_id"]


async def test_another_tenants_request_does_not_exist() -> None:
    house = fake_house(gatekeeper=NamedGate())
    async with running(house) as (_, client):
        await client.post(CHAT, json=HELLO, headers={"Authorization": "acme", "X-Request-Id": "a"})
        path = "/v1/cache/requests/a"
        assert 200 == (await client.get(path, headers={"Authorization": "acme"})).status_code
        other = await client.get(path, headers={"Authorization": "rival"})
        assert (404, "request_not_found") == (other.status_code, other.json()["error"]["code"])


async def test_a_running_request_shows_its_progress(house: FakeHouse, app: FastAPI) -> None:
    house.engine.script = Script(answer="x" * 400, step_s=0.005)
    visit = Visit(app, CHAT, HELLO | {"stream": True}).start()
    await visit.first_text()
    record = next(house.wire.records.journal.newest())
    assert record.state is State.RUNNING and record.served is not None
    assert record.served.usage.output > 0 and record.bill is None
    visit.leave()
    await visit.task
    await quiet(house, app)
    ended = house.wire.records.journal.find(record.request_id)
    assert ended is not None and ended.state is State.FINISHED
    assert ended.served is not None and ended.served.outcome == "client_gone"
    assert ended.delivered is False


async def test_a_refused_request_says_with_what(
    house: FakeHouse, client: httpx.AsyncClient
) -> None:
    house.meter.refuse = insufficient_balance(
        "the balance does not cover it", needed=2, available=1, currency="CNY"
    )
    await client.post(CHAT, json=HELLO, headers={"X-Request-Id": "poor"})
    told = (await client.get("/v1/cache/requests/poor")).json()
    assert ("refused", 402, "insufficient_balance") == (
        told["state"],
        told["error"]["status"],
        told["error"]["code"],
    )


async def test_the_ring_is_bounded_by_count_and_by_bytes() -> None:
    for settings in (JournalSettings(max_requests=3), JournalSettings(max_bytes=10_000)):
        journal = Journal(settings)
        house = fake_house(gatekeeper=OpenGate(), journal=journal)
        async with running(house) as (app, client):
            for number in range(6):
                headers = {"X-Request-Id": str(number)}
                await client.post(CHAT, json=HELLO, headers=headers)
                await quiet(house, app)
            assert ["5", "4", "3"] == [record.client_id for record in journal.newest()]
            assert sum(record.nbytes for record in journal.newest()) == journal.nbytes


async def test_a_journal_of_none_keeps_none() -> None:
    house = fake_house(journal=Journal(JournalSettings(max_requests=0)))
    async with running(house) as (app, client):
        await client.post(CHAT, json=HELLO)
        await quiet(house, app)
        assert 0 == house.wire.records.journal.num_records == house.wire.records.journal.nbytes
