"""Exports: events and cost rows as their specifications ask, at least once, in whole lines."""

import csv
import io
import re
from itertools import product
from unittest.mock import Mock

import pytest

from billing.errors import ExportError
from billing.gate.entries import AMOUNTS, Kind
from billing.gate.holds import RequestContext
from billing.money import UNITS, parse_amount
from billing.prices.book import Terms
from billing.prices.cards import parse_card
from billing.reports import export
from billing.reports.csv import safe_cell
from billing.reports.documents import entry_document
from billing.reports.focus import corrected_instants, focus_csv, focus_rows
from billing.store import reports as store_reports
from billing.usage import Usage
from tests.support.billing import TestLedger, card_text, entries_of, priced
from tests.support.commands import said

USAGE = Usage(hit_device=100, hit_disk=900, miss=100, output=7)
DAY_S = 86_400


@pytest.fixture
def house(house):
    """A deposit, a charge, an hour of a pin, and corrections within the month and after it."""
    house.charge("r1", USAGE, project="web")
    house.charge("pin:doc:0:0", Usage(storage_token_hours=64))
    house.correct("r1", "c1", 1_000_000, "=1+1")
    house.clock.advance(40 * DAY_S)
    house.correct("r1", "c2", 1_000_000, "late")
    return house


def focus(house: TestLedger) -> list[dict[str, str]]:
    booked = entries_of(house.ledger.store)
    rows = focus_rows(booked, house.ledger.book, corrected_instants(house.ledger.store, booked))
    return list(csv.DictReader(io.StringIO(focus_csv(rows).decode())))


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


# FOCUS 1.0, the tables "Content constraints" of its columns: those that are mandatory, those that
# may be null, and those that may not be null in a row of usage.
MANDATORY = words("""BilledCost BillingAccountId BillingAccountName BillingCurrency BillingPeriodEnd
BillingPeriodStart ChargeCategory ChargeClass ChargeDescription ChargePeriodEnd ChargePeriodStart
ContractedCost EffectiveCost InvoiceIssuerName ListCost PricingQuantity PricingUnit ProviderName
PublisherName ServiceCategory ServiceName""")
NULLABLE = words("""BillingAccountName ChargeClass ChargeDescription PricingQuantity PricingUnit
ConsumedQuantity ConsumedUnit ContractedUnitPrice ListUnitPrice PricingCategory ResourceId SkuId
SkuPriceId SubAccountId SubAccountName Tags x_KeyId x_Session x_User""")
OF_USAGE = words("""PricingQuantity PricingUnit PricingCategory ConsumedQuantity ConsumedUnit SkuId
SkuPriceId ListUnitPrice ContractedUnitPrice""")
DECIMALS = words("""BilledCost ContractedCost EffectiveCost ListCost PricingQuantity
ConsumedQuantity ListUnitPrice ContractedUnitPrice""")


def test_rows_are_what_focus_1_0_asks_for(house):
    rows = focus(house)
    assert MANDATORY <= rows[0].keys()
    own = [name for name in rows[0] if name.startswith("x_")]
    assert own == list(rows[0])[-len(own) :]
    for row in rows:
        empty = {name for name, value in row.items() if not value}
        assert empty <= NULLABLE
        assert row["ChargeCategory"] in ("Usage", "Adjustment")
        assert row["ChargeClass"] in ("", "Correction")
        assert row["ChargeFrequency"] in ("One-Time", "Usage-Based")
        assert row["ServiceCategory"] == "AI and Machine Learning"
        if row["ChargeCategory"] == "Usage" and not row["ChargeClass"]:
            assert not empty & OF_USAGE
        if row["ChargeCategory"] != "Usage":
            assert not row["ConsumedQuantity"] + row["ConsumedUnit"]
        for name in DECIMALS - empty:
            assert re.fullmatch(r"-?\d+(\.\d+)?", row[name])
        for name in ("BillingPeriodStart", "ChargePeriodStart"):
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row[name])
            assert row[name] < row[name.replace("Start", "End")]


def test_focus_rows_add_up_to_what_was_charged(house):
    rows = focus(house)
    assert -house.account().balance + UNITS == sum(parse_amount(row["BilledCost"]) for row in rows)
    of_r1 = [row for row in rows if row["x_EntryId"] == "acme/2"]
    assert 1_114_000_000 == sum(parse_amount(row["ListCost"]) for row in of_r1)
    assert ["hit_device", "hit_disk", "miss", "output"] == [r["ChargeDescription"] for r in of_r1]
    assert {("web", "web")} == {(row["SubAccountId"], row["SubAccountName"]) for row in of_r1}
    assert ["Token-Hours"] == [r["PricingUnit"] for r in rows if r["x_RequestId"][:3] == "pin"]
    assert of_r1[0]["BillingPeriodEnd"] == "2025-02-01T00:00:00Z"
    within, later = (
        (row["ChargeCategory"], row["ChargeClass"], row["ChargeDescription"]) for row in rows[-2:]
    )
    assert (("Adjustment", "", "'=1+1"), ("Usage", "Correction", "late")) == (within, later)


TWO_MODELS = card_text(
    "models",
    priced("small", "0.1", "1", "2", night={"hit": "0.05", "miss": "0.5", "output": "1"}),
    priced("*", "1", "10", "20"),
    minimum_cached_tokens=64,
    window=("night", "00:00", "08:00"),
)


def test_one_price_id_is_one_price_of_one_sku(house):
    house.accounts.apply_card(parse_card(TWO_MODELS), by="test")
    for hour in range(0, 24, 6):
        for model, hit in product(("small", "large"), (32, 640)):
            used = Usage(hit_disk=hit, miss=100, output=7)
            charged(house, f"{hour}-{model}-{hit}", used, model)
        house.clock.advance(6 * 3600)
    prices: dict[str, set[tuple[str, ...]]] = {}
    for row in focus(house):
        if row["SkuPriceId"]:
            said = (row["SkuId"], row["ListUnitPrice"], row["ContractedUnitPrice"])
            prices.setdefault(row["SkuPriceId"], set()).add(said)
    assert {1} == {len(said) for said in prices.values()}, prices
    assert 12 <= len([name for name in prices if name.startswith("models/1/")])


NIGHTS = card_text(
    "nights",
    priced("*", "100", "1000", "10", request="0.02", minimum="0.4"),
    tenants=["acme"],
    window=("night", "22:00", "10:00"),
)
NIGHTS += '[[group]]\nname = "partners"\ntenants = ["acme"]\nfactor = "0.5"\n'


def charged(house: TestLedger, name: str, usage: Usage, model: str = "small") -> None:
    pinned = house.ledger.book.at(model, house.clock(), "CNY", Terms(tenant="acme"))
    context = RequestContext(admitted_ns=house.clock())
    hold = house.ledger.reserve("acme", name, 0, pinned, context=context).result()
    house.settle(hold, usage)


def test_what_lacks_to_a_minimum_has_no_price_and_a_fee_has_one(house):
    house.accounts.apply_card(parse_card(NIGHTS), by="test")
    for number in range(3):
        charged(house, f"n{number}", Usage(miss=10 + number, output=7))
    for entry in entries_of(house.ledger.store):  # no amount is told in units of 1e-12
        told = entry_document(entry)["details"]
        amounts = [told[name] for name in AMOUNTS & told.keys()]
        assert all(re.fullmatch(r"-?\d{1,4}\.\d{2,12}", each) for each in amounts)
    rows = [row for row in focus(house) if row["x_RequestId"].startswith("n")]
    lacking = [row for row in rows if row["ChargeDescription"] == "minimum"]
    assert {("Adjustment", "", "", "")} == {
        (row["ChargeCategory"], row["SkuPriceId"], row["ListUnitPrice"], row["PricingUnit"])
        for row in lacking
    }
    assert 3 == len({row["BilledCost"] for row in lacking})
    [fee] = {
        (r["SkuPriceId"], r["ContractedUnitPrice"]) for r in rows if r["SkuId"][-7:] == "request"
    }
    assert ("nights/1/small/night | partners:request", "0.01") == fee


def test_what_grants_pay_is_a_credit_so_that_billed_costs_are_what_was_paid(house):
    """Also if it is given back, and in the next month."""
    house.deposit(Kind.GRANT, 10**9, "g")
    house.charge("g1", Usage(miss=1200))
    house.charge("g2", Usage(miss=5))
    house.correct("g1", "half", 700_000_000)
    house.clock.advance(30 * DAY_S)
    house.correct("g1", "rest")
    names = ("g1", "g2", "half", "rest")
    rows = [row for row in focus(house) if row["x_RequestId"] in names]
    paid = [row for row in rows if row["ChargeCategory"] == "Credit"]
    assert ["-0.001", "0.0005", "0.0005"] == [row["BilledCost"] for row in paid]
    assert ["", "", "Correction"] == [row["ChargeClass"] for row in paid]
    billed = sum(parse_amount(row["BilledCost"]) for row in rows)
    booked = [e for e in entries_of(house.ledger.store) if e.request_id in names]
    assert billed == -sum(e.amount - e.amounts.get("granted", 0) for e in booked)


def export_to(out, *flags, **how):
    command = ("usage", "export", "--to", out, *flags, "--data-dir", out.parent)
    return said(*command, **how)


@pytest.mark.parametrize("length", [1, 200, 999, 10**6])
def test_a_line_that_a_crash_tore_is_cut_off_and_nothing_is_skipped(house, tmp_path, length):
    """The crash came after some bytes of a chunk and before its position was noted."""
    out = tmp_path / "out"
    export_to(out)
    whole = out.read_bytes()
    out.write_bytes(whole[:length])
    export_to(out, "--name", "again")
    assert out.read_bytes().endswith(b"\n")
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    ids = {row["x_EntryId"] for row in rows}
    assert {"acme/2", "acme/3", "acme/4", "acme/5"} == ids - {"x_EntryId"}


def test_what_is_new_is_appended_and_one_export_writes_at_a_time(house, tmp_path):
    out = tmp_path / "costs.csv"
    assert "5 entries written" in export_to(out)
    assert "0 entries written" in export_to(out)
    before = out.read_bytes()
    house.charge("r2", USAGE)
    with export.appending(out):
        assert f"another export is writing {out}" in export_to(out, code=1)
    assert "1 entry written" in export_to(out)
    assert 4 == len(out.read_bytes().removeprefix(before).splitlines())
    (tmp_path / "folder").mkdir()
    assert "cannot write" in export_to(tmp_path / "folder", code=1)


def test_a_scheme_of_a_service_is_refused_with_what_takes_the_events():
    refused = said("usage", "export", "--to", "stripe+https://api.stripe.com", code=2)
    assert "maps the events" in refused


def test_the_position_waits_for_the_disk(house, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(28, "No space left on device")))
    refused = pytest.raises(ExportError, match="No space left")
    with refused, export.appending(tmp_path / "o") as file:
        export.drain(house.ledger.store, "o", lambda chunk: export.write_durably(file, b"x\n"))
    with house.ledger.store.reading() as connection:
        assert {} == store_reports.cursors(connection, "o")


@pytest.mark.parametrize("text", ["=1+1", "@SUM(1)", "-cmd", "\t=1", "\uff1d1+1"])
def test_a_cell_is_one_line_and_no_formula(text):
    assert f"'{text}" == safe_cell(text)
    for plain in ("-0.5", "plain"):
        assert plain == safe_cell(plain)
    assert "two lines" == safe_cell("two\r\nlines")
