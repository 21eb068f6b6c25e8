"""The journal: what it keeps of a request, for whom, and how much of it."""

import asyncio
from dataclasses import replace

import pytest

from api.journal.journal import Journal, JournalSettings, RequestRecord, State
from billing.gate.work import insufficient_balance
from tests.api.conftest import NamedGate, quiet, running
from tests.api.driver import Visit
from tests.support.wire import OpenGate, Script, fake_house

CHAT = "/v1/chat/completions"
SECRET = "never to be kept"
HELLO = {"model": "bytes", "messages": [{"role": "user", "content": SECRET}]}


async def test_a_finished_request_is_reported_in_full(house, client):
    house.engine.script = Script(hits={"hit_disk": 10})
    trace = f"00-{32 * 'a'}-{16 * 'b'}-01"
    answer = (await client.post(CHAT, json=HELLO, headers={"traceparent": trace})).json()
    told = (await client.get(f"/v1/cache/requests/{answer['id']}")).json()
    assert answer["id"] == f"chatcmpl-{told['id']}"
    assert trace == told["traceparent"], "which finds it in the gateway's trace"
    assert answer["usage"] == told["usage"]
    assert ("finished", "finished") == (told["state"], told["outcome"])
    assert ["stop"] == told["finish_reasons"]
    assert ("0.000012", "CNY") == (told["bill"]["amount"], told["bill"]["currency"])
    assert {"queue", "load", "prefill", "decode", "ttft", "total"} <= told["timings_ms"].keys()
    assert told["delivered"] is True


def _num_said(record: RequestRecord | None) -> int:
    return record.served.usage.output if record is not None and record.served is not None else 0


async def test_a_running_request_shows_its_progress_and_nothing_that_was_said(house, app):
    house.engine.script = Script(answer=SECRET * 40, step_s=0.005)
    journal = house.wire.records.journal
    visit = Visit(app, CHAT, HELLO | {"stream": True}).start()
    async with asyncio.timeout(30):
        while _num_said(said := next(journal.newest(), None)) <= len(SECRET):
            await asyncio.sleep(0.005)
    assert said is not None and SECRET not in repr(said)
    assert said.state is State.RUNNING and said.bill is None
    visit.leave()
    await visit.task
    await quiet(house, app)
    ended = journal.find(said.request_id)
    assert ended is not None and ended.state is State.FINISHED
    assert ended.served is not None and ended.served.outcome == "client_gone"
    assert ended.delivered is False


@pytest.mark.parametrize("keeps", [False, True])
async def test_prompts_are_kept_where_the_operator_says_so_alone(keeps):
    house = fake_house(journal=Journal(JournalSettings(keep_prompts=keeps)))
    async with running(house) as (_, client):
        await client.post(CHAT, json=HELLO)
        record = next(house.wire.records.journal.newest())
        kept = [bytes(tokens.tolist()).decode() for tokens in record.prompts]
        assert keeps == any(SECRET in text for text in kept) and keeps == bool(kept)
        assert SECRET not in repr(replace(record, prompts=()))


async def test_a_request_is_found_by_the_clients_own_id_and_its_tenant():
    house = fake_house(gatekeeper=NamedGate())
    async with running(house) as (_, client):
        await client.post(CHAT, json=HELLO, headers={"Authorization": "acme", "X-Request-Id": "a"})
        path = "/v1/cache/requests/a"
        mine = await client.get(path, headers={"Authorization": "acme"})
        assert (200, "a") == (mine.status_code, mine.json()["client_id"])
        other = await client.get(path, headers={"Authorization": "rival"})
        assert (404, "not_found") == (other.status_code, other.json()["error"]["code"])


async def test_a_refused_request_says_with_what(house, client):
    house.meter.refuse = insufficient_balance(
        "the balance does not cover it", needed=2, available=1, currency="CNY"
    )
    await client.post(CHAT, json=HELLO, headers={"X-Request-Id": "poor"})
    told = (await client.get("/v1/cache/requests/poor")).json()
    assert "refused" == told["state"]
    assert (402, "insufficient_balance") == (told["error"]["status"], told["error"]["code"])


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (JournalSettings(max_requests=3), ["5", "4", "3"]),
        (JournalSettings(max_bytes=10_000), ["5", "4", "3"]),
        (JournalSettings(max_requests=0), []),
    ],
)
async def test_the_ring_is_bounded_by_count_and_by_bytes(settings, kept):
    journal = Journal(settings)
    house = fake_house(gatekeeper=OpenGate(), journal=journal)
    async with running(house) as (app, client):
        for number in range(6):
            await client.post(CHAT, json=HELLO, headers={"X-Request-Id": str(number)})
            await quiet(house, app)
        assert kept == [record.client_id for record in journal.newest()]
        assert sum(record.nbytes for record in journal.newest()) == journal.nbytes
        assert len(kept) == journal.num_records
