"""Every way out of a request settles its charge exactly once, by the written policy."""

import asyncio
import random

import pytest
from limits.aio.storage import MemoryStorage

from api.access.rate_limits import LimitSettings, Quota, WindowLimits
from api.collaborators import WireSettings
from api.routes.chat import ChatFormat
from billing.gate.outcomes import Outcome
from tests.api.bank import CHAT, HELLO
from tests.api.conftest import quiet, refusal, running
from tests.api.driver import Visit
from tests.support.wire import Script, fake_house

STREAM = HELLO | {"stream": True}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_settlement_stands_before_the_last_bytes(app, house, stream):
    house.engine.script = Script(answer="abc", step_s=0.001)
    gate = asyncio.Event()
    settle_at_once = type(house.meter).admit

    async def admit(caller, job):
        charge = await settle_at_once(house.meter, caller, job)
        settle = charge.settle

        async def wait_then_settle(served, *, delivered):
            await gate.wait()
            return await settle(served, delivered=delivered)

        charge.settle = wait_then_settle
        return charge

    house.meter.admit = admit
    visit = Visit(app, CHAT, HELLO | {"stream": stream}).start()
    await asyncio.sleep(0.1)
    assert '"finish_reason":"stop"' not in visit.text
    assert "[DONE]" not in visit.text
    gate.set()
    await visit.task
    assert '"finish_reason":"stop"' in visit.text


@pytest.mark.parametrize("fault", ["broken", "stuck"])
async def test_a_client_whose_socket_takes_nothing_has_left(fault):
    house = fake_house(settings=WireSettings(write_timeout_s=0.05))
    house.engine.script = Script(answer="x" * 1000, step_s=0.002)
    async with running(house) as (app, _):
        visit = Visit(app, CHAT, STREAM).start()
        await visit.first_text()
        setattr(visit, fault, True)
        await visit.task
        assert Outcome.CLIENT_GONE is house.meter.last.served.outcome


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_in_an_answer_is_logged_but_not_shown_to_the_client(
    client, house, caplog, monkeypatch, stream
):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(ChatFormat, "chunk" if stream else "absorb", broken)
    response = await client.post(CHAT, json=HELLO | {"stream": stream})
    assert (500, "internal_error") == refusal(response)
    assert "inside" not in response.text
    assert any(record.exc_info and "inside" in str(record.exc_info[1]) for record in caplog.records)


async def test_one_prompt_refused_gives_all_back(client, house):
    house.engine.script = Script(stall=True)
    submit = house.engine.submit

    def refuse_the_second(request):
        if house.engine.requests:
            raise ZeroDivisionError
        submit(request)

    house.engine.submit = refuse_the_second
    body = {"model": "bytes", "prompt": ["one", "two"]}
    assert 500 == (await client.post("/v1/completions", json=body)).status_code
    assert (0, 1) == (house.meter.last.num_settled, house.meter.last.num_voided)


@pytest.mark.parametrize("stage", ["limits", "meter", "engine", "journal"])
async def test_a_fault_at_any_stage_of_admission_gives_back_what_came_before(stage, monkeypatch):
    """The place under the limit, the hold and the engine's work, whichever the request had."""
    limits = WindowLimits(LimitSettings(tenant=Quota(concurrency=1)), MemoryStorage())
    house = fake_house(limits=limits)
    house.engine.script = Script(stall=True)
    owner, method = {
        "limits": (WindowLimits, "admit"),
        "meter": (house.meter, "admit"),
        "engine": (house.engine, "submit"),
        "journal": (house.wire.records.journal, "begin"),
    }[stage]

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    async with running(house) as (_, client):
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, broken)
            for _ in range(2):
                assert 500 == (await client.post(CHAT, json=HELLO)).status_code
        assert 0 == house.wire.inference.bridge.num_open
        assert {"limits": 0, "meter": 0}.get(stage, 2) == len(house.meter.charges)
        assert all(charge.num_voided == 1 for charge in house.meter.charges)
        house.engine.script = Script(answer="abc")
        assert 200 == (await client.post(CHAT, json=HELLO)).status_code


async def test_cancelling_at_random_reconciles_to_the_token(app, house):
    """What is billed is what the engine made; of every three clients two leave when they like."""
    house.engine.script = Script(answer="y" * 60, step_s=0.001)
    dice = random.Random(5)
    visits = [Visit(app, CHAT, HELLO | {"stream": n % 2 == 0, "n": 1 + n % 3}) for n in range(60)]

    async def visit_and_leave(number: int, visit: Visit) -> None:
        visit.start()
        if number % 3:
            await asyncio.sleep(dice.random() * 0.3)
            visit.leave()
        await visit.task

    await asyncio.gather(*(visit_and_leave(*numbered) for numbered in enumerate(visits)))
    await quiet(house, app)
    billed = {charge.job.request_id: charge.served.usage.output for charge in house.meter.charges}
    assert {name: house.engine.tokens_made.get(name, 0) for name in billed} == billed
    assert len({charge.served.outcome for charge in house.meter.charges}) == 2


async def test_a_silent_engine_is_bridged_by_comments():
    house = fake_house(settings=WireSettings(keepalive_s=0.02))
    house.engine.script = Script(stall=True)
    async with running(house) as (app, _):
        visit = Visit(app, CHAT, STREAM).start()
        await visit.first_text()
        await asyncio.sleep(0.05)
        visit.leave()
        await visit.task
        assert ": keep-alive\n\n" in visit.text
