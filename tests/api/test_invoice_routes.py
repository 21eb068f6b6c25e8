"""Invoices over the wire: what admins issue, customers see theirs, and nobody else's."""

import csv
import io
import time
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from billing.gate.outcomes import Outcome
from billing.invoices.register import InvoiceRegister
from billing.invoices.render import Form, render
from billing.keys import Scope
from billing.money import UNITS, parse_units
from billing.usage import Usage
from tests.api.bank import Bank
from tests.api.conftest import serving
from tests.api.test_money_routes import WHY, House, client, house, last_trail, ok, refused

__all__ = ["client", "house"]
PARTIES = """
[seller]
name = "Example Cloud"
address = ["Street 1"]
taxes = [{ name = "VAT", rate = "19" }]
[[buyer]]
tenant = "acme"
name = "<b>Acme</b>"
address = ["1 Road"]
"""
NOW = datetime.now(UTC)
LAST_MONTH = (NOW.replace(day=1) - timedelta(days=1)).strftime("%Y-%m")
DAY_NS = 86_400 * 10**9
THIS_MONTH = NOW.strftime("%Y-%m")


async def test_an_admin_issues_marks_and_prints(client: httpx.AsyncClient, house: House) -> None:
    assert (400, "invalid_parties", None) == await refused(
        await client.get(f"/invoices/of/acme/{LAST_MONTH}")
    )
    told = await ok(await client.post("/parties", json={"toml": PARTIES, **WHY}))
    assert {"seller": "Example Cloud", "buyers": ["acme"]} == told
    assert ("eve", "invoice.parties", "1", "as agreed") == last_trail(house)
    draft = await ok(await client.get(f"/invoices/of/acme/{THIS_MONTH}"))
    assert ("draft", 1) == (draft["state"], draft["requests"])
    body = {"tenant": "acme", "month": THIS_MONTH, **WHY}
    assert (409, "invoice_conflict", None) == await refused(
        await client.post("/invoices", json=body)
    )
    body["month"] = LAST_MONTH
    issued = (await client.post("/invoices", json=body)).json()
    assert ("INV-000001", "paid") == (issued["number"], issued["state"])  # nothing is due
    assert issued == (await client.post("/invoices", json=body)).json()
    assert issued == await ok(await client.get("/invoices/INV-000001"))
    assert house.told("invoice", "show") == await ok(await client.get("/invoices"))
    page = await client.get("/invoices/INV-000001?format=html")
    assert "&lt;b&gt;Acme&lt;/b&gt;" in page.text and "<b>Acme" not in page.text
    assert "style-src 'sha256-" in page.headers["content-security-policy"]
    pytest.importorskip("fpdf")
    pdf = await client.get("/invoices/INV-000001?format=pdf")
    assert ("application/pdf", b"%PDF-") == (pdf.headers["content-type"], pdf.content[:5])
    void = {"state": "void", **WHY}
    assert "void" == (await ok(await client.post("/invoices/INV-000001/mark", json=void)))["state"]
    paid = void | {"state": "paid"}
    refusal = await refused(await client.post("/invoices/INV-000001/mark", json=paid))
    assert (409, "invoice_conflict", None) == refusal
    assert 404 == (await client.get("/invoices/INV-000009")).status_code
    assert 409 == (await client.post("/invoices/INV-000001/credit", json=WHY)).status_code


async def test_a_customer_sees_what_was_issued_to_it(bank: Bank) -> None:
    async with serving(bank) as (_, client, _):
        acme, bolt = bank.customer(UNITS), bank.customer(UNITS, "bolt")
        register = InvoiceRegister(bank.ledger.store, clock_ns=lambda: time.time_ns() + 40 * DAY_NS)
        register.apply_parties(PARTIES, by="test")
        register.finalize("acme", THIS_MONTH, by="test")
        (listed,) = (await client.get("/v1/invoices", headers=acme)).json()
        assert ("INV-000001", "paid") == (listed["number"], listed["state"])
        one = await client.get("/v1/invoices/INV-000001", headers=acme)
        assert listed["total"] == one.json()["total"]
        assert [] == (await client.get("/v1/invoices", headers=bolt)).json()
        assert 404 == (await client.get("/v1/invoices/INV-000001", headers=bolt)).status_code
        bare = bank.customer(UNITS, "cole", scopes=frozenset({Scope.INFERENCE}))
        assert 403 == (await client.get("/v1/invoices", headers=bare)).status_code


def test_csv_adds_up_to_the_total(house: House) -> None:
    hold = house.reserve("r2")
    house.books.ledger.settle(hold, Usage(miss=333_333, output=77_777), Outcome.FINISHED).result()
    register = InvoiceRegister(house.books.store, clock_ns=lambda: time.time_ns() + 40 * DAY_NS)
    register.apply_parties(PARTIES, by="test")
    issued = register.finalize("acme", THIS_MONTH, by="test")
    rows = list(csv.DictReader(io.StringIO(render(issued, Form.CSV).decode())))
    assert parse_units(issued.document["total"]) == sum(parse_units(row["amount"]) for row in rows)
    assert issued.document["taxes"][0]["amount"] == rows[-1]["amount"]
