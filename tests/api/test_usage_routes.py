"""What a request wrote and who asked is charged, and customers see their own usage alone."""

import csv
import io
import time
from datetime import UTC, datetime

import pytest

from billing.budgets import BudgetSpan, Of, set_budget
from billing.gate.limits import SpendLimit
from billing.keys import Scope
from billing.money import UNITS, format_units
from billing.prices.cards import parse_card
from billing.proof import audit
from engine.request import Lookup
from tests.api.bank import CHAT, HELLO, MISS, OUTPUT, PROMPT_TOKENS
from tests.api.conftest import of, refusal, serving
from tests.support.billing import card_text, priced
from tests.support.wire import Script
from tiers.errors import MissReason

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
        told = of(day, "tenant", "period", "requests", "prompt_tokens")
        assert ("acme", TODAY, 1, PROMPT_TOKENS) == told
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
        lower = SpendLimit(name="cap", tenant="acme", amount=1)
        set_budget(bank.accounts, lower, by="test", now_ns=time.time_ns(), reason="test")
        passed, _ = (await client.get("/v1/usage/account")).json()["spend_limits"]
    assert ("0.000000000001", "0.00") == of(passed, "amount", "left"), "it is below what is spent"
    assert ("cap", "tenant", "", "month") == of(cap, "name", "of", "value", "per")
    told = (format_units(each) for each in (UNITS // 2, spent, 0, UNITS // 2 - spent))
    assert (*told,) == of(cap, "amount", "spent", "held", "left")
    assert cap["ends_at"].endswith("-01T00:00:00Z")
    assert ("users", "*", "ann", "day") == of(users, "name", "value", "highest", "per")
    ann = spent - PROMPT_TOKENS * MISS - OUTPUT
    assert (format_units(ann), format_units(100 * MISS - ann)) == of(users, "spent", "left")


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


LOOKUP = Lookup((), MissReason.ABSENT, block_size=4)
WRITES = {"valid_from": "2025-06-01T00:00:00Z", "factors": {"flex": "0.5"}}
CARD = card_text("writes", priced("*", "1", "2", "0", cache_write="4"), **WRITES)


@pytest.mark.parametrize(
    ("hits", "cache", "written"),
    [
        (0, True, PROMPT_TOKENS // 4 * 4),
        (8, True, PROMPT_TOKENS // 4 * 4 - 8),
        (PROMPT_TOKENS - 1, True, 0),  # the last token is computed, and nothing is written
        (0, False, 0),
    ],
)
async def test_computed_tokens_of_kept_blocks_are_a_write(bank, hits, cache, written):
    async with serving(bank) as (_, client, house):
        headers = bank.customer(UNITS)
        bank.accounts.apply_card(parse_card(CARD), by="test")
        house.engine.script = Script(hits={"hit_disk": hits}, lookup=LOOKUP)
        body = HELLO | {"cachesvc": {"cache": cache}}
        assert 200 == (await client.post(CHAT, json=body, headers=headers)).status_code
    charge = bank.charges()[-1]
    assert written == charge.details["usage"].get("cache_write", 0)
    computed = PROMPT_TOKENS - hits
    assert -charge.amount == (hits * 1 + computed * 2 + written * 4) * 10**6
    assert audit.verify(bank.store).problems == []


async def test_what_a_request_marks_is_hit_and_written_at_its_own_price(bank):
    marks = {"explicit_hit": "0.5", "explicit_write": "3"}
    explicit = card_text("writes", priced("*", "1", "2", "0", **marks), **WRITES)
    marked = {"type": "text", "text": "hello there", "cache_control": {"type": "ephemeral"}}
    async with serving(bank) as (_, client, house):
        headers = bank.customer(UNITS)
        bank.accounts.apply_card(parse_card(explicit), by="test")
        house.engine.script = Script(hits={"hit_disk": 4}, lookup=LOOKUP)
        asked = {"model": "bytes", "messages": [{"role": "user", "content": [marked]}]}
        answer = await client.post("/v1/messages", json=asked | {"max_tokens": 4}, headers=headers)
    assert 200 == answer.status_code, answer.text
    charge = bank.charges()[-1]
    usage, told = charge.details["usage"], answer.json()["usage"]
    assert (4, 4) == (usage["hit_disk"], usage["explicit_hit"])
    assert 0 < usage["explicit_write"] <= usage["miss"]
    assert usage["explicit_write"] == told["cache_creation"]["ephemeral_5m_input_tokens"]
    price = 4 * 500_000 + usage["miss"] * 2_000_000 + usage["explicit_write"] * 3_000_000
    assert price == -charge.amount
    assert audit.verify(bank.store).problems == []


async def test_the_user_and_the_service_tier_are_kept_with_the_charge(bank):
    async with serving(bank) as (_, client, _):
        headers = bank.customer(UNITS)
        bank.accounts.apply_card(parse_card(CARD), by="test")
        labels = {"team": "search", "n": 1, "x" * 65: "long", "bad": "a\u0000b"}
        body = HELLO | {"user": "ann", "metadata": labels, "service_tier": "flex"}
        assert 200 == (await client.post(CHAT, json=body, headers=headers)).status_code
    charge = bank.charges()[-1]
    details = charge.details
    assert ("ann", {"team": "search"}) == (details["user"], details["tags"])
    assert "standard | flex" == details["window"]
    assert -charge.amount == PROMPT_TOKENS * 10**6
    assert audit.verify(bank.store).problems == []
