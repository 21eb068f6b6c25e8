"""Customers see their own usage, entries and statement, and nobody else's."""

import csv
import io
import time
from datetime import UTC, datetime

from billing.budgets import BudgetSpan, Of, set_budget
from billing.gate.limits import SpendLimit
from billing.keys import Scope
from billing.money import UNITS, format_units
from tests.api.bank import CHAT, HELLO, MISS, OUTPUT, PROMPT_TOKENS
from tests.api.conftest import refusal, serving

MONTH = datetime.now(UTC).strftime("%Y-%m")
TODAY = datetime.now(UTC).date().isoformat()


async def test_a_customer_sees_its_own_usage_and_money(bank):
    async with serving(bank) as (_, client, _):
        headers = bank.customer(UNITS)
        other = bank.customer(UNITS, "bolt")
        body = HELLO | {"user": "ann", "metadata": {"team": "search"}}
        answer = (await client.post(CHAT, json=body, headers=headers)).json()
        await client.post(CHAT, json=HELLO, headers=other)
        client.headers.update(headers)
        (day,) = (await client.get("/v1/usage")).json()
        assert ("acme", TODAY, 1, PROMPT_TOKENS) == (
            day["tenant"],
            day["period"],
            day["requests"],
            day["prompt_tokens"],
        )
        (by_key,) = (await client.get("/v1/usage?unit=month&breakdown=key")).json()
        assert by_key["part"].startswith("key_")
        entries = (await client.get("/v1/usage/entries")).json()
        assert ["charge", "topup"] == [entry["kind"] for entry in entries]
        one = await client.get("/v1/usage/entries", params={"request_id": answer["id"]})
        assert [entries[0]] == one.json()
        statement = (await client.get(f"/v1/usage/statement/{MONTH}")).json()
        assert ("acme", 1) == (statement["tenant"], statement["requests"])
        account = (await client.get("/v1/usage/account")).json()
        assert account["balance"] == statement["closing_balance"]
        spent = PROMPT_TOKENS * MISS + answer["usage"]["completion_tokens"] * OUTPUT
        assert bank.accounts.tenant("acme").balance == UNITS - spent


async def test_a_customer_sees_its_own_hard_limits(bank):
    async with serving(bank) as (_, client, _):
        headers = bank.customer(UNITS)
        bank.customer(UNITS, "bolt")
        for name, tenant, amount, more in (
            ("cap", "acme", UNITS // 2, {}),
            ("users", "acme", 100 * MISS, {"of": Of.USER, "value": "*", "per": BudgetSpan.DAY}),
            ("other", "bolt", UNITS, {}),
        ):
            limit = SpendLimit(name=name, tenant=tenant, amount=amount, **more)
            set_budget(bank.accounts, limit, by="test", now_ns=time.time_ns(), reason="test")
        client.headers.update(headers)
        await client.post(CHAT, json=HELLO | {"user": "ben", "max_tokens": 1})
        await client.post(CHAT, json=HELLO | {"user": "ann"})
        spent = UNITS - bank.accounts.tenant("acme").balance
        cap, users = (await client.get("/v1/usage/account")).json()["spend_limits"]
    assert ("cap", "tenant", "", "month") == tuple(cap[n] for n in ("name", "of", "value", "per"))
    assert [format_units(each) for each in (UNITS // 2, spent, 0, UNITS // 2 - spent)] == [
        cap[name] for name in ("amount", "spent", "held", "left")
    ]
    assert cap["ends_at"].endswith("-01T00:00:00Z")
    assert ("users", "*", "ann", "day") == tuple(
        users[n] for n in ("name", "value", "highest", "per")
    )
    ann = spent - PROMPT_TOKENS * MISS - OUTPUT
    assert [format_units(each) for each in (ann, 100 * MISS - ann)] == [
        users[name] for name in ("spent", "left")
    ]


async def test_a_limit_set_below_what_is_spent_leaves_nothing(bank):
    async with serving(bank) as (_, client, _):
        client.headers.update(bank.customer(UNITS))
        await client.post(CHAT, json=HELLO)
        limit = SpendLimit(name="cap", tenant="acme", amount=1)
        set_budget(bank.accounts, limit, by="test", now_ns=time.time_ns(), reason="test")
        [cap] = (await client.get("/v1/usage/account")).json()["spend_limits"]
    assert format_units(0) == cap["left"]


async def test_tables_come_as_csv(bank):
    async with serving(bank) as (_, client, _):
        client.headers.update(bank.customer(UNITS))
        body = HELLO | {"metadata": {"team": "=1+1"}}
        await client.post(CHAT, json=body)
        for path in ("/v1/usage", "/v1/usage/entries", f"/v1/usage/statement/{MONTH}"):
            answer = await client.get(path, params={"format": "csv"})
            assert "text/csv; charset=utf-8" == answer.headers["content-type"]
            rows = list(csv.DictReader(io.StringIO(answer.text)))
            assert rows
            assert None not in rows[0]
        entries = await client.get("/v1/usage/entries?format=csv")
        assert "team==1+1" in entries.text
        page = await client.get(f"/v1/usage/statement/{MONTH}?format=html")
        assert 400 == page.status_code


async def test_usage_needs_its_scope_and_shows_no_other_tenant(bank):
    async with serving(bank) as (_, client, _):
        bank.customer(UNITS, "bolt")
        headers = bank.customer(UNITS, scopes=frozenset({Scope.INFERENCE}))
        for path in ("", "/sessions", "/entries", "/account", f"/statement/{MONTH}"):
            answer = await client.get(f"/v1/usage{path}", headers=headers)
            assert (403, "insufficient_scope") == refusal(answer)
            assert 401 == (await client.get(f"/v1/usage{path}")).status_code


async def test_the_page_runs_only_its_own_files(bank):
    async with serving(bank) as (_, client, _):
        page = await client.get("/account")
        assert 200 == page.status_code
        assert "script-src 'self'" in page.headers["content-security-policy"]
        for name in ("account.js", "account.css"):
            assert f"/account/{name}" in page.text
            assert 200 == (await client.get(f"/account/{name}")).status_code
        assert 404 > (await client.get("/account/other")).status_code >= 400
