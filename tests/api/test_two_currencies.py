"""Two tenants in two currencies, side by side on every page that shows money."""

import html
import re
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import httpx
import pytest

from billing.prices.cards import parse_card
from cachesvc.operator.lookups import read_blocks
from tests.api.bank import CHAT, HELLO
from tests.api.conftest import quiet, running
from tests.api.test_admin_pages import HTML, Cache
from tests.support.admin import fake_parts
from tests.support.billing import card_text, priced
from tests.support.wire import Script
from tests.unit.test_tree import BLOCK, add

CARD = card_text("dollars", priced("*", "1", "4", "8"), currency="USD")
TIERED = CARD.replace('version = "1"', 'version = "2"').replace("2025-01-01", "2025-06-01")
TIERED += 'hit_disk = "3"\ncache_write = "1"\n'
JSON = {"accept": "application/json"}
CURRENCIES = {"acme": "CNY", "bolt": "USD"}
HITS = 1_000_000 // BLOCK  # of a block: acme saved 0.9 CNY of them, bolt 3 USD
# A number with two places or more, which only money has here, with no currency behind it or behind
# the next number: a rate stands before its amount.
BARE = re.compile(
    r"(?<![\d.])\d+\.\d{2,}(?![\d.]| (?:CNY|USD)\b| (?:ms|s)\b| [\d.]+ (?:CNY|USD)\b)"
)
STATS: dict[str, Any] = {"version": "1", "model": "m", "uptime_s": 60.0, "cache": {"tiers": {}}}
STATS |= {"engine": {"engines": ()}}
TODAY = "2026-01-01"  # or any day before


def shown(page: str) -> str:
    """The text of a page, without rates, which stand in tables of one currency."""
    body = page.partition("<main")[2].partition("</main>")[0]
    body = re.sub(r'<section[^>]+labelledby="cards">.*?</section>', "", body, flags=re.DOTALL)
    body = body.replace("such as 12.50", "")
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))


@pytest.fixture
def bank(bank):
    bank.accounts.apply_card(parse_card(CARD), by="test")
    return bank


@pytest.fixture
async def client(bank):
    """An admin's, after a request of each tenant. Of each, a million tokens were hit."""
    cache = Cache(CURRENCIES)
    for name in CURRENCIES:
        (root,) = cache.owners.roots_of(name)
        (block,) = add(cache.tiers.index, [1] * BLOCK, root)
        block.hits = HITS
    wire = bank.house.wire
    parts = fake_parts(
        books=bank.books,
        journal=wire.records.journal,
        explorer=cache.explorer,
        blocks=partial(read_blocks, cache.call),
        currencies=lambda: ["USD", "CNY"],
        stats=lambda: STATS,
    )
    bank.house.engine.script = Script(hits={"hit_disk": 10})
    async with running(bank.house, admin=parts) as (app, client):
        for name, currency in CURRENCIES.items():
            key = bank.customer(10**13, name, currency=currency)
            assert 200 == (await client.post(CHAT, json=HELLO, headers=key)).status_code
        await quiet(bank.house, app)
        client.headers.update(HTML)
        yield client


async def text(client: httpx.AsyncClient, path: str) -> str:
    answer = await client.get(f"/admin{path}")
    assert 200 == answer.status_code, answer.text
    return shown(answer.text)


async def test_both_currencies_stand_on_a_page_and_no_sum_without_one(client):
    for path in ("", "/money", "/requests", "/explorer", "/tenants", "/money?since=2026-09-01"):
        page = await text(client, path)
        assert "CNY" in page and "USD" in page, path
        assert [] == BARE.findall(page), page


@pytest.mark.parametrize(("name", "currency"), CURRENCIES.items())
async def test_what_is_of_one_tenant_is_in_its_currency_alone(client, name, currency):
    (row,) = (await client.get(f"/admin/api/requests?tenant={name}")).json()
    for path in (f"/tenants/{name}", f"/requests/{row['id']}", f"/explorer?tenant={name}"):
        page = await text(client, path)
        assert currency in page and [] == BARE.findall(page), page
    other = ({"CNY", "USD"} - {currency}).pop()
    for path in (f"?tenant={name}", f"/money?tenant={name}", f"/requests?tenant={name}"):
        assert currency in (page := await text(client, path))
        assert not re.search(rf"\d {other}", page), page


async def test_prompts_and_prefixes_are_priced_by_the_tenants_own_card(client):
    for name, price in (("acme", "1"), ("bolt", "4")):
        body = {"tenant": name, "request": HELLO}
        quote = (await client.post("/admin/api/cache/quote", json=body)).json()
        assert CURRENCIES[name] == quote["price"]["currency"]
        tokens = quote["prompt_tokens"]
        assert float(price) * tokens / 1e6 == pytest.approx(float(quote["price"]["prompt"]))
    assert "0.9000 CNY" in (page := await text(client, "/explorer")) and "3.0000 USD" in page


async def test_models_are_listed_with_the_prices_of_whoever_asks(client, bank):
    bank.accounts.apply_card(parse_card(TIERED), by="test")
    prices = {}
    for name in CURRENCIES:
        secret, _ = bank.accounts.create_key(name, by="test")
        headers = {"authorization": f"Bearer {secret}"}
        (model,) = (await client.get("/v1/models", headers=headers)).json()["data"]
        assert 4096 == model["context_length"]
        assert ["text"] == model["architecture"]["input_modalities"]
        prices[name] = model["pricing"]
    assert ("0.000001", "CNY") == (prices["acme"]["prompt"], prices["acme"]["currency"])
    plain = {"prompt": "0.000004", "completion": "0.000008", "request": "0.00"}
    plain |= {"currency": "USD", "card": "dollars", "version": "2", "window": "standard"}
    tiers = dict.fromkeys(("device", "host", "disk", "remote"), "0.000001")
    assert {
        "input_cache_read": "0.000003",  # of a tier, the dearest
        "input_cache_read_by_tier": tiers | {"disk": "0.000003"},
        "input_cache_write": "0.000005",  # a miss and its write
    } | plain == prices["bolt"]


async def test_one_query_filters_the_pages_and_the_json(client, bank):
    (key,) = bank.accounts.keys("bolt")
    today = datetime.now(UTC).date()
    for query, names in (
        ("tenant=bolt", {"bolt"}),
        (f"key={key.key_id}", {"bolt"}),
        ("model=bytes", {"acme", "bolt"}),
        ("model=other", set[str]()),
        (f"tenant=acme&key={key.key_id}", set[str]()),
        ("since=2026-01-01&until=2026-01-01", set[str]()),
        (f"since={today}&until={today}", {"acme", "bolt"}),
    ):
        told = (await client.get(f"/admin/api/requests?{query}")).json()
        assert names == {each["tenant"] for each in told}
        for each in told:
            assert (CURRENCIES[each["tenant"]], 20) == (each["currency"], each["prompt_tokens"])
        for path in ("requests", "money"):
            page = (await client.get(f"/admin/{path}?{query}")).text
            found = re.findall(r'<(?:th scope="row"|td class="words")>.*?title="(acme|bolt)"', page)
            if path == "money":  # its balances are of the tenant alone
                found = re.findall(r'title="(acme|bolt)"', page.partition('id="balances"')[0])
            assert names == set(found), (query, path)


async def test_a_time_that_a_page_cannot_use_is_refused_by_name(client):
    for path, query in (
        ("requests", "since=yesterday"),
        ("requests", "until=2026-13-01"),
        ("money", "since=2026-01-01T08:15"),
        ("money", "since=2020-01-01"),
        ("api/requests", "until=soon"),
    ):
        answer = await client.get(f"/admin/{path}?{query}", headers=JSON)
        assert 400 == answer.status_code, path
        assert query.partition("=")[0] in (answer.json()["error"]["param"] or "since"), path


async def test_requests_are_listed_by_arrival_though_another_ended_later(client, bank):
    journal = bank.house.wire.records.journal
    last, first = journal.newest()
    journal.restore([replace(first, request_id="f" * 32, arrived_s=last.arrived_s + 1)])
    journal.restore([replace(first, request_id="0" * 32, arrived_s=first.arrived_s - 1)])
    page = (await client.get("/admin/requests")).text
    assert ["f" * 32, last.request_id, first.request_id, "0" * 32] == re.findall(
        r'<th scope="row"><a href="/admin/requests/(\w+)"', page
    )


async def test_a_tenant_without_entries_changes_its_currency_and_is_charged_in_it(client, bank):
    key = bank.customer(0, "later")
    body = {"currency": "USD", "why": "it pays in dollars"}
    made = await client.post("/admin/api/tenants/later/currency", json=body)
    assert "USD" == made.json()["currency"]
    bank.accounts.set_credit_limit("later", None, by="test")
    assert 200 == (await client.post(CHAT, json=HELLO, headers=key)).status_code
    (row,) = (await client.get("/admin/api/requests?tenant=later")).json()
    assert "USD" == row["currency"]
    again = await client.post(
        "/admin/api/tenants/later/currency", json=body | {"currency": "CNY"}, headers=JSON
    )
    assert (409, "already_exists") == (again.status_code, again.json()["error"]["code"])
    assert [] == bank.books.prover.prove().proof.problems


async def test_a_card_names_the_models_that_it_leaves_without_a_price(client):
    narrow = CARD.replace("dollars", "narrow").replace("2025-01", "2025-02").replace('"*"', '"b*"')
    body = {"card": {"toml": narrow}, "why": "some models"}
    answer = (await client.post("/admin/api/prices/apply", json=body)).json()
    assert [] == answer["unpriced"], "bytes begins with b"
    body["card"] = {
        "toml": narrow.replace("narrow", "other").replace("-02", "-03").replace("b*", "c*")
    }
    (left,) = (await client.post("/admin/api/prices/apply", json=body)).json()["unpriced"]
    assert {"tenant": "bolt", "currency": "USD", "models": ["bytes"]} == left


async def test_who_is_refused_for_want_of_money_is_not_served(client, bank):
    key = bank.customer(1, "poor")  # something is there, and too little for any request
    assert " poor served " in await text(client, "/tenants")
    assert 402 == (await client.post(CHAT, json=HELLO, headers=key)).status_code
    for path in ("/tenants", "/tenants/poor"):
        page = await text(client, path)
        assert "poor refused, 402" in page, path
    assert "acme served" in await text(client, "/tenants")


async def test_a_key_shows_the_day_of_its_last_use(client, bank):
    bank.customer(0, "idle")
    keys = (await client.get("/admin/api/keys")).json()
    today = str(datetime.now(UTC).date())
    assert {"acme": today, "bolt": today, "idle": None} == {
        each["tenant"]: each["last_used"] for each in keys
    }
    page = await text(client, "/keys")
    assert 2 == page.count(f"never {today} Revoke") and 1 == page.count("never never Revoke")
    assert f"used {today}" in await text(client, "/tenants/bolt")
