"""The wire on a real ledger: an answer is paid once, however often it is asked for."""

import asyncio
import json
import threading
from dataclasses import replace

import pytest
from limits.aio.storage import MemoryStorage

from api.access.rate_limits import LimitSettings, Quota, WindowLimits
from billing.gate.commands import Deposit
from billing.gate.entries import Kind
from billing.money import UNITS
from engine.errors import QueueFull
from tests.api.bank import CHAT, HELLO, MISS, OUTPUT, PROMPT_TOKENS
from tests.api.conftest import begun, quiet, refusal, serving
from tests.api.driver import Visit
from tests.support.wire import Script


async def test_an_answer_lost_while_its_settlement_is_waited_for_is_not_paid_twice(
    bank, monkeypatch
):
    """Another process holds the database. The client gives up meanwhile and silently asks again, as
    openai's does; a byte more or less would be another request."""
    locked, sync = threading.Event(), bank.store.sync

    def wait_and_sync() -> None:
        assert locked.wait(10)
        sync()

    monkeypatch.setattr(bank.store, "sync", wait_and_sync)
    async with serving(bank) as (app, client, house):
        locked.set()
        headers = bank.customer(UNITS)
        locked.clear()
        house.engine.script = Script(answer="zz")
        visit = Visit(app, CHAT, HELLO, **headers).start()
        async with asyncio.timeout(10):
            while bank.accounts.tenant("acme").seq < 2:  # committed, and not yet on the disk
                await asyncio.sleep(0.01)
        visit.leave()
        await asyncio.sleep(0.05)
        locked.set()
        await visit.task
        assert "" == visit.text
        retry = headers | {"x-stainless-retry-count": "1"}
        answer = await client.post(CHAT, content=json.dumps(HELLO), headers=retry)
        assert 200 == answer.status_code
        await quiet(house, app)
    assert PROMPT_TOKENS * MISS + 3 * OUTPUT == bank.spent(UNITS)


async def test_a_key_pays_once_for_an_answer_that_was_lost(bank):
    """Whatever client asks again; and another key asks for another answer, of the same body."""
    async with serving(bank) as (app, client, house):
        headers = bank.customer(UNITS)
        raw, charged = json.dumps(HELLO), []
        for key in ("order-1", "order-2"):
            house.engine.script = Script(answer="z" * 1000, step_s=0.002)
            before = sum(house.engine.tokens_made.values())
            visit = Visit(app, CHAT, HELLO, **headers, **{"idempotency-key": key}).start()
            await begun(house, tokens=before + 2)
            visit.leave()
            await visit.task
            await quiet(house, app)
            charged.append(bank.spent(UNITS))
        assert 0 < charged[0] < charged[1]
        house.engine.script = Script(answer="zz")
        for key in ("order-1", "order-1"):  # the second is a replay
            again = headers | {"idempotency-key": key}
            assert 200 == (await client.post(CHAT, content=raw, headers=again)).status_code
        await quiet(house, app)
    paid = PROMPT_TOKENS * MISS + 3 * OUTPUT
    assert paid + charged[1] - charged[0] == bank.spent(UNITS)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_gets_the_first_answer_again_and_pays_once(bank, stream):
    async with serving(bank) as (_, client, house):
        headers = bank.customer(UNITS) | {"Idempotency-Key": "order-1"}
        house.engine.script = Script(answer="abc")
        body = HELLO | {"stream": stream, "stream_options": {"include_usage": True}}
        first = await client.post(CHAT, json=body, headers=headers)
        house.engine.script = Script(answer="something else")
        again = await client.post(CHAT, json=body, headers=headers)
        assert (200, first.content) == (again.status_code, again.content)
        assert first.headers["content-type"] == again.headers["content-type"]
        assert "true" == again.headers["idempotent-replayed"]
        other = await client.post(CHAT, json=body | {"seed": 1}, headers=headers)
        assert (409, "idempotency_key_reused") == refusal(other)
        unfit = await client.post(CHAT, json=body, headers=headers | {"Idempotency-Key": "a b"})
        assert 400 == unfit.status_code
        assert 1 == len(house.engine.requests)
    assert PROMPT_TOKENS * MISS + 4 * OUTPUT == bank.spent(UNITS)


async def test_a_refusal_leaves_its_key_free(bank):
    """No money, too many requests, too much in the queue: later the same key gets its answer."""
    limits = WindowLimits(LimitSettings(tenant=Quota(concurrency=1)), MemoryStorage())
    wire = bank.house.wire
    bank.house = replace(bank.house, wire=replace(wire, access=replace(wire.access, limits=limits)))
    async with serving(bank) as (app, client, house):
        headers = bank.customer(0) | {"idempotency-key": "order-1"}
        poor = await client.post(CHAT, json=HELLO, headers=headers)
        bank.ledger.post(
            Deposit("acme", Kind.TOPUP, amount=UNITS, reference="later", by="test")
        ).result()
        house.engine.script = Script(stall=True)
        visit = Visit(app, CHAT, HELLO, authorization=headers["authorization"]).start()
        await begun(house, requests=1)
        crowded = await client.post(CHAT, json=HELLO, headers=headers)
        visit.leave()
        await visit.task
        paid = bank.spent(UNITS)
        house.engine.script = Script(refuse=QueueFull("full"))
        full = await client.post(CHAT, json=HELLO, headers=headers)
        assert [402, 429, 503] == [answer.status_code for answer in (poor, crowded, full)]
        house.engine.script = Script(answer="abc")
        for replay in (None, "true"):
            answer = await client.post(CHAT, json=HELLO, headers=headers)
            assert (200, replay) == (answer.status_code, answer.headers.get("idempotent-replayed"))
    assert paid + PROMPT_TOKENS * MISS + 4 * OUTPUT == bank.spent(UNITS)


async def test_a_key_whose_request_runs_is_busy_and_one_that_failed_is_free(bank):
    async with serving(bank) as (app, client, house):
        headers = bank.customer(UNITS) | {"idempotency-key": "order-2"}
        house.engine.script = Script(stall=True)
        visit = Visit(app, CHAT, HELLO, **headers).start()
        await begun(house, requests=1)
        raw = json.dumps(HELLO)
        busy = await client.post(CHAT, content=raw, headers=headers)
        assert (409, "idempotency_key_busy") == refusal(busy)
        assert "1" == busy.headers["retry-after"]
        visit.leave()
        await visit.task
        house.engine.script = Script(answer="abc")
        assert 200 == (await client.post(CHAT, content=raw, headers=headers)).status_code
        house.engine.script = Script(fail_after=0)
        third = headers | {"idempotency-key": "order-3"}
        assert 500 == (await client.post(CHAT, content=raw, headers=third)).status_code
        house.engine.script = Script(refuse=ZeroDivisionError())
        assert 500 == (await client.post(CHAT, content=raw, headers=third)).status_code
        house.engine.script = Script(answer="abc")
        assert 200 == (await client.post(CHAT, content=raw, headers=third)).status_code
