"""The wire on a real ledger in SQLite: keys, holds, charges, balances."""

import asyncio
import contextlib
import json
import threading
import time
from datetime import datetime
from typing import Any

import pytest
from fastapi.routing import APIRoute
from sqlalchemy import create_engine, select

from api.app import AREAS
from api.collaborators import WireSettings
from api.routes import health
from api.routes.chat import ChatFormat
from billing.budgets import set_budget
from billing.gate.limits import SpendLimit
from billing.gate.outcomes import Outcome
from billing.keys import Scope
from billing.money import UNITS, format_units
from billing.prices.book import NS
from billing.proof import audit
from billing.reports.receipts import verify_receipt
from billing.store.schema import undelivered
from tests.api.bank import CHAT, HELLO, HIT, MISS, OUTPUT, PROMPT_TOKENS, Bank
from tests.api.conftest import begun, refusal, serving
from tests.api.driver import Visit
from tests.support.wire import Script


async def test_a_server_without_keys_serves_everyone_and_owes_nothing_that_would_stop_it(bank):
    async with serving(bank) as (_, client, _):
        for headers in ({}, {"authorization": "Bearer any"}):
            told = (await client.get("/user/balance")).json()
            [info] = told["balance_infos"]
            assert told["is_available"]
            assert ("0.00", "0.00") == (info["total_balance"], info["topped_up_balance"])
            assert 200 == (await client.post(CHAT, json=HELLO, headers=headers)).status_code
    assert 0 < -bank.accounts.tenant("default").balance


async def test_once_a_key_exists_every_route_needs_one(bank):
    async with serving(bank) as (_, client, _):
        headers = bank.customer(UNITS)
        asked = [
            (method, route.path)
            for area in AREAS
            for route in area.router.routes
            if isinstance(route, APIRoute) and area is not health
            for method in route.methods
        ]
        assert {("POST", CHAT), ("GET", "/v1/cache/events")} < set(asked)
        for method, path in asked:
            bare = await client.request(method, path)
            assert (401, "missing_api_key") == refusal(bare), path
            assert "Bearer" == bare.headers["www-authenticate"]
        wrong = await client.get("/v1/models", headers={"authorization": "Bearer sk-no"})
        assert (401, "invalid_api_key") == refusal(wrong)
        assert "sk-no" not in wrong.text
        assert 200 == (await client.get("/v1/models", headers=headers)).status_code
        for open_path in ("/health", "/health/ready", "/metrics"):
            assert 200 == (await client.get(open_path)).status_code


async def test_without_its_database_the_gate_is_shut_and_says_so(bank, monkeypatch, caplog):
    """A database that is gone for a while is no bug of ours: clients are told to come back, and
    only the log says what is wrong with it."""
    monkeypatch.setattr("billing.accounts.REFRESH_S", 0)
    monkeypatch.setattr("billing.accounts.MISS_REFRESH_S", 0)
    async with serving(bank) as (_, client, house):
        known, unknown = bank.customer(UNITS), {"authorization": "Bearer sk-no"}
        with monkeypatch.context() as patched:
            patched.setattr(bank.store, "engine", create_engine("sqlite:////no/such/folder/file"))
            for headers in (known, unknown):
                for method, path in (("POST", CHAT), ("GET", "/user/balance")):
                    answer = await client.request(method, path, json=HELLO, headers=headers)
                    code = answer.json()["error"]["code"]
                    assert (503, "ledger_unavailable") == (answer.status_code, code)
                    assert "5" == answer.headers["retry-after"]
                    assert "database file" not in answer.text
                    assert "unable to open database file" in caplog.messages[-1]
        assert 200 == (await client.post(CHAT, json=HELLO, headers=known)).status_code
        assert 1 == len(house.engine.requests)


async def test_keys_end_and_have_scopes_and_without_balance_nothing_is_computed(bank):
    async with serving(bank) as (_, client, house):
        reader = bank.customer(UNITS, scopes=frozenset({Scope.USAGE}))
        refused = await client.post(CHAT, json=HELLO, headers=reader)
        assert (403, "insufficient_scope") == refusal(refused)
        assert 200 == (await client.get("/user/balance", headers=reader)).status_code
        expired = bank.customer(UNITS, "late", expires_ns=1)
        answer = await client.post(CHAT, json=HELLO, headers=expired)
        assert (401, "expired_api_key") == refusal(answer)
        answer = await client.post(CHAT, json=HELLO, headers=bank.customer(0, "poor"))
        assert (402, "insufficient_balance") == refusal(answer)
        assert [] == house.engine.requests


async def test_a_charge_is_exact_and_the_balance_shows_it(bank):
    async with serving(bank) as (_, client, house):
        headers = bank.customer(UNITS)
        house.engine.script = Script(answer="hello", hits={"hit_disk": 70})
        body = {"model": "bytes", "prompt": "p" * 100, "cachesvc": {"details": True}}
        answer = (await client.post("/v1/completions", json=body, headers=headers)).json()
        due = 70 * HIT + 30 * MISS + 6 * OUTPUT
        cost = {"currency": "CNY", "amount": format_units(due)}
        cost["saved"] = format_units(70 * (MISS - HIT))
        assert cost.items() <= answer["cachesvc"]["cost"].items()
        assert due == bank.spent(UNITS)
        balance = (await client.get("/user/balance", headers=headers)).json()
    left = format_units(UNITS - due)
    told = {"total_balance": left, "granted_balance": "0.00", "topped_up_balance": left}
    assert {"is_available": True, "balance_infos": [told | {"currency": "CNY"}]} == balance


async def test_hits_that_cost_as_much_as_misses_say_why(bank):
    async with serving(bank) as (_, client, house):
        headers = bank.customer(UNITS)
        house.engine.script = Script(answer="hello", hits={"hit_device": 27})
        body = {"model": "bytes", "prompt": "p" * 100, "cachesvc": {"receipt": True}}
        answer = (await client.post("/v1/completions", json=body, headers=headers)).json()
        assert bank.spent(UNITS) == 100 * MISS + 6 * OUTPUT
        path = f"/v1/cache/requests/{answer['id']}"
        told = (await client.get(path, headers=headers)).json()
    note = "27 hits, fewer than the card's 64: priced as misses"
    assert note == told["bill"]["note"]


async def test_the_instant_of_the_price_is_that_of_the_admission(bank):
    """Two looks at the clock may fall into two windows of a card, and the charge into neither."""
    instant_ns = bank.ledger._clock_ns() - 3600 * NS
    async with serving(bank) as (_, client, house):
        house.wire.books.meter._clock_ns = lambda: instant_ns
        answer = await client.post(CHAT, json=HELLO, headers=bank.customer(UNITS))
        assert 200 == answer.status_code
    (charge,) = bank.charges()
    told = charge.details["admitted_ns"], charge.details["outcome"]
    assert (instant_ns, Outcome.FINISHED) == told


ASKED = {
    CHAT: HELLO,
    "/v1/completions": {"model": "bytes", "prompt": "hi"},
    "/v1/responses": {"model": "bytes", "input": "hi"},
    "/v1/messages": HELLO | {"max_tokens": 3},
}


@pytest.mark.parametrize("path", ASKED)
async def test_a_spend_limit_is_told_in_each_protocol_with_its_end(bank, path):
    async with serving(bank) as (_, client, house):
        headers = bank.customer(UNITS)
        cap(bank, 1)
        answer = await client.post(path, json=ASKED[path], headers=headers)
        assert 429 == answer.status_code
        assert "false" == answer.headers["x-should-retry"]
        error = answer.json()["error"]
        assert "spend_limit_reached" == error["code"]
        kind = "rate_limit_error" if path == "/v1/messages" else "insufficient_quota"
        assert kind == error["type"]
        limit = error["limit"]
        assert ("cap", "tenant", "month", "0.000000000001", "0.00") == tuple(
            limit[name] for name in ("name", "of", "per", "amount", "spent")
        )
        wait_s = int(answer.headers["retry-after"])
        ends_s = datetime.fromisoformat(limit["ends_at"]).timestamp()
        assert abs(ends_s - wait_s - time.time()) < 60
        assert [] == house.engine.requests


async def test_a_limit_that_running_requests_hold_is_retried_soon(bank):
    async with serving(bank) as (app, client, house):
        headers = bank.customer(UNITS)
        cap(bank, 2 * PROMPT_TOKENS * MISS + 4 * OUTPUT)
        house.engine.script = Script(answer="z" * 400, step_s=0.1)
        visit = Visit(app, CHAT, HELLO | {"stream": True}, **headers).start()
        await begun(house, requests=1)
        answer = await client.post(CHAT, json=HELLO | {"max_tokens": 1}, headers=headers)
        assert (429, "1") == (answer.status_code, answer.headers["retry-after"])
        assert "x-should-retry" not in answer.headers
        visit.leave()
        await visit.task
        again = await client.post(CHAT, json=HELLO | {"max_tokens": 1}, headers=headers)
        assert 200 == again.status_code
    assert [] == audit.verify(bank.ledger.store).problems


def cap(bank: Bank, units: int) -> None:
    budget = SpendLimit(name="cap", tenant="acme", amount=units)
    set_budget(bank.accounts, budget, by="test", now_ns=time.time_ns(), reason="test")


CUT = [
    (CHAT, HELLO, '"finish_reason":"length"'),
    ("/v1/completions", {"model": "bytes", "prompt": "p" * PROMPT_TOKENS}, '"length"'),
    ("/v1/responses", {"model": "bytes", "input": "hi"}, '"reason":"max_output_tokens"'),
    ("/v1/messages", HELLO | {"max_tokens": 100}, '"stop_reason":"max_tokens"'),
]


async def cut_answer(bank: Bank, path: str, body: dict[str, Any], headers: Any) -> Any:
    """The text of an answer that is cut off after twelve tokens, and the vendor blocks in it."""
    async with serving(bank) as (_, client, house):
        house.engine.script = Script(answer="z" * 100, tokens_per_step=3, step_s=0.002)
        answer = await client.post(path, json=body, headers=headers)
    assert 200 == answer.status_code
    lines = answer.text.replace("data: ", "").split("\n") if body["stream"] else [answer.text]
    documents = [json.loads(line) for line in lines if line.startswith("{")]
    documents += [each["response"] for each in documents if "response" in each]
    return answer.text, [each["cachesvc"] for each in documents if "cachesvc" in each]


@pytest.mark.parametrize(("path", "body", "reason"), CUT, ids=[path for path, _, _ in CUT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limited", [False, True])
async def test_an_answer_ends_where_the_money_or_the_limit_does(
    bank, path, body, reason, stream, limited
):
    """The hold covers the prompt and three slices of four tokens; not one token more goes out. The
    answer says which limit ended it and until when, as the refusal of a new request does."""
    paid = PROMPT_TOKENS * MISS + 12 * OUTPUT
    given = UNITS if limited else paid
    headers = bank.customer(given)
    if limited:
        cap(bank, paid)
    text, told = await cut_answer(bank, path, body | {"stream": stream}, headers)
    assert reason in text
    assert told
    limit = {"name": "cap", "of": "tenant", "per": "month", "amount": format_units(paid)}
    for block in told:
        if not limited:
            assert {"ended_by": "insufficient_balance"} == block
        else:
            assert "spend_limit_reached" == block["ended_by"]
            assert limit.items() <= block["limit"].items()
            assert block["limit"]["ends_at"].endswith("-01T00:00:00Z")
    assert paid == bank.spent(given)


async def test_many_at_once_never_overdraw(bank):
    paid = 5 * (PROMPT_TOKENS * MISS + 8 * OUTPUT)
    async with serving(bank) as (_, client, house):
        headers = bank.customer(paid)
        house.engine.script = Script(answer="z" * 30, step_s=0.001)
        answers = await asyncio.gather(
            *(client.post(CHAT, json=HELLO, headers=headers) for _ in range(20))
        )
    assert {200, 402} == {answer.status_code for answer in answers}
    assert 0 <= bank.accounts.tenant("acme").balance
    billed = sum(
        answer.json()["usage"]["completion_tokens"] * OUTPUT + PROMPT_TOKENS * MISS
        for answer in answers
        if answer.status_code == 200
    )
    assert billed == bank.spent(paid)


@pytest.mark.parametrize(("stream", "made"), [(False, 3), (True, 3), (False, 0), (True, 0)])
async def test_a_failure_costs_what_had_been_sent(bank, stream, made):
    """Of an answer that goes out whole, nothing: its client got a 500, and will ask again."""
    async with serving(bank) as (_, client, house):
        headers = bank.customer(UNITS)
        house.engine.script = Script(answer="z" * 99, fail_after=made, step_s=0.02)
        answer = await client.post(CHAT, json=HELLO | {"stream": stream}, headers=headers)
        assert (200 if stream and made else 500) == answer.status_code
        if stream and made:
            assert '"error":{"message"' in answer.text
            assert answer.text.endswith("data: [DONE]\n\n")
    assert [Outcome.FAILED] == [entry.details["outcome"] for entry in bank.charges()]
    assert (PROMPT_TOKENS * MISS + made * OUTPUT if stream and made else 0) == bank.spent(UNITS)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hold_that_lapses_is_the_servers_failure(tmp_path, stream):
    """As where the database was away for longer than a lease. Clients do not retry a 404."""
    bank = Bank(tmp_path, lease_s=0)
    bank.house.engine.script = Script(answer="z" * 999, step_s=0.02)
    with contextlib.closing(bank):
        async with serving(bank) as (app, _, house):
            headers = bank.customer(UNITS)
            visit = Visit(app, CHAT, HELLO | {"stream": stream}, **headers).start()
            await begun(house, tokens=1)
            assert 1 == await asyncio.to_thread(bank.ledger.sweeper.sweep)
            await visit.task
            assert (200 if stream else 500) == visit.messages[0]["status"]
            assert '"code":"generation_failed"' in visit.text
        assert (PROMPT_TOKENS * MISS if stream else 0) <= bank.spent(UNITS)
        assert stream or 0 == bank.spent(UNITS)
        assert [] == audit.verify(bank.store).problems


async def test_an_answer_that_we_fail_to_write_costs_nothing(bank, monkeypatch):
    """A bug that shows when the answer is settled already."""
    monkeypatch.setattr(ChatFormat, "body", lambda *_: {"text": "\ud800"})
    async with serving(bank) as (_, client, house):
        headers = bank.customer(UNITS)
        house.engine.script = Script(answer="abc")
        answer = await client.post(CHAT, json=HELLO, headers=headers)
        assert (500, "internal_error") == refusal(answer)
    assert 0 == bank.spent(UNITS)
    assert [] == audit.verify(bank.store).problems


async def test_the_lease_of_a_silent_request_is_renewed(tmp_path):
    """A request that waits longer than a lease keeps its hold."""
    bank = Bank(tmp_path, lease_s=1, settings=WireSettings(keepalive_s=0.1))
    bank.house.engine.script = Script(stall=True)
    with contextlib.closing(bank):
        async with serving(bank) as (app, _, _):
            headers = bank.customer(UNITS)
            visit = Visit(app, CHAT, HELLO, **headers).start()
            await asyncio.sleep(2.5)
            assert 0 < bank.accounts.tenant("acme").held
            visit.leave()
            await visit.task
        assert 0 == bank.ledger.stats().swept


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_pays_and_the_journal_says_what_was_sent(bank, stream):
    """A crash is billed from it: of an answer that goes out whole, nothing was sent before."""
    async with serving(bank) as (app, _, house):
        headers = bank.customer(UNITS)
        house.engine.script = Script(answer="z" * 1000, step_s=0.002)
        visit = Visit(app, CHAT, HELLO | {"stream": stream}, **headers).start()
        await begun(house, tokens=40)
        (held,) = bank.store.all_holds()
        told = visit.text.count('"content":"z"')
        visit.leave()
        await visit.task
        (made,) = house.engine.tokens_made.values()
    assert made < 1000, "it was ended in the engine"
    assert PROMPT_TOKENS * MISS + made * OUTPUT == bank.spent(UNITS)
    assert [Outcome.CLIENT_GONE] == [entry.details["outcome"] for entry in bank.charges()]
    with bank.store.reading() as connection:
        noted = connection.scalars(select(undelivered.c.request_id)).all()
    assert stream == (not noted), "what was sent in part is not given back to a retry"
    assert (stream, stream) == (held.usage.output > 0, held.usage.prompt > 0)
    assert held.usage.output <= told


async def test_a_request_that_ends_while_its_hold_is_taken_leaves_none(bank):
    apply, reached, go = bank.store.apply, threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        reached.set()
        go.wait(30)
        return apply(*arguments, **options)

    async with serving(bank) as (app, _, house):
        headers = bank.customer(UNITS)
        bank.store.apply = slow  # type: ignore[method-assign]
        visit = Visit(app, CHAT, HELLO, **headers).start()
        assert await asyncio.to_thread(reached.wait, 30)
        visit.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await visit.task
        go.set()
        async with asyncio.timeout(30):
            while bank.accounts.tenant("acme").seq < 2:
                await asyncio.sleep(0.01)
    assert [] == house.engine.requests
    assert 0 == bank.spent(UNITS)
    (charge,) = bank.charges()
    assert Outcome.FAILED == charge.details["outcome"]


async def test_a_receipt_proves_the_charge(bank):
    async with serving(bank) as (_, client, house):
        headers = bank.customer(UNITS)
        house.engine.script = Script(answer="abc")
        body = HELLO | {"cachesvc": {"receipt": True}}
        answer = (await client.post(CHAT, json=body, headers=headers)).json()
        assert 401 == (await client.get("/v1/receipts/keys")).status_code
        told = (await client.get("/v1/receipts/keys", headers=headers)).json()["keys"]
    receipt = answer["cachesvc"]["receipt"]
    published = {key["key_id"]: key["public_key"] for key in told}
    assert verify_receipt(receipt, bytes.fromhex(published[receipt["key_id"]]))
    assert format_units(PROMPT_TOKENS * MISS + 4 * OUTPUT) == receipt["amount"]
    assert not verify_receipt(receipt | {"amount": "0.00"}, bank.signer.public_key)
