"""Invoices and the ledger agree to the last unit, whatever is charged, corrected and made again."""

import random
from contextlib import suppress
from datetime import UTC, datetime

import pytest
import sqlalchemy as sa

from billing.errors import BillingError, InvoiceError, PartiesError, UnknownInvoice
from billing.gate.commands import Deposit
from billing.gate.entries import Kind
from billing.gate.outcomes import Outcome
from billing.invoices.document import month_sums
from billing.invoices.parties import parse_parties
from billing.invoices.register import Invoice, InvoiceRegister, InvoiceState
from billing.money import UNITS, parse_units
from billing.prices.book import NS
from billing.proof import audit
from billing.reports.statement import month_days
from billing.store.schema import invoices
from billing.usage import Usage
from tests.support.billing import TestLedger

PARTIES = """
[seller]
name = "Example Cloud GmbH"
address = ["Street 1", "10115 Berlin"]
tax_id = "DE123456789"
payment = "IBAN DE02 1203 0000 0000 2020 51"
payment_days = 14
time_zone = "{zone}"
taxes = [{{ name = "VAT", rate = "19" }}]

[[buyer]]
tenant = "acme"
name = "Acme Ltd"
address = ["1 Road", "London"]
"""
BY = {"by": "eve", "reason": "test"}


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * NS


@pytest.fixture
def register(house: TestLedger) -> InvoiceRegister:
    made = InvoiceRegister(house.ledger.store, clock_ns=house.clock)
    made.apply_parties(PARTIES.format(zone="UTC"), **BY)
    return made


def units(invoice: Invoice, name: str) -> int:
    return parse_units(invoice.document[name])


def check(invoice: Invoice) -> None:
    """Every column adds up."""
    document = invoice.document
    rows = document["lines"] + document["adjustments"]
    assert units(invoice, "net") == sum(parse_units(row["amount"]) for row in rows)
    assert units(invoice, "net") == sum(parse_units(row["exact"]) for row in rows)
    taxes = sum(parse_units(tax["amount"]) for tax in document["taxes"])
    assert units(invoice, "total") == units(invoice, "net") + taxes
    assert units(invoice, "due") == units(invoice, "total") - units(invoice, "paid_in_advance")


def test_a_month_becomes_an_invoice_that_never_changes(
    house: TestLedger, register: InvoiceRegister
) -> None:
    house.accounts.set_credit_limit("acme", None, by="test")
    house.clock.now_ns = at("2025-01-20T12:00")
    house.charge("r1", Usage(miss=12_345_678, output=1_234_567))
    draft = register.month("acme", "2025-01")
    assert (InvoiceState.DRAFT, "") == (draft.state, draft.number)
    with pytest.raises(InvoiceError, match="is not over"):
        register.finalize("acme", "2025-01", **BY)
    house.clock.now_ns = at("2025-02-03T12:00")
    issued = register.finalize("acme", "2025-01", **BY)
    check(issued)
    said = issued.document
    assert ("INV-000001", "14.81", "2.81", "17.62", "0.00", "17.62") == (
        issued.number,
        *(said[name] for name in ("net",)),
        said["taxes"][0]["amount"],
        *(said[name] for name in ("total", "paid_in_advance", "due")),
    )
    assert ("2025-02-03", "2025-02-17") == (said["issued_on"], said["due_on"])
    assert "0.004812" == said["carried"]
    house.charge("r2", Usage(miss=1))
    assert issued == register.finalize("acme", "2025-01", **BY) == register.find("INV-000001")
    paid = register.mark("INV-000001", InvoiceState.PAID, **BY)
    assert (said, InvoiceState.PAID) == (paid.document, register.find("INV-000001").state)
    with pytest.raises(InvoiceError, match="is paid"):
        register.mark("INV-000001", InvoiceState.VOID, **BY)


def test_a_tenant_that_paid_in_advance_owes_the_tax(
    house: TestLedger, register: InvoiceRegister
) -> None:
    house.fund(20 * UNITS)
    house.ledger.post(
        Deposit("acme", Kind.GRANT, amount=2 * UNITS, reference="g", by="test")
    ).result()
    house.charge("r1", Usage(miss=10_000_000))
    house.clock.now_ns = at("2025-02-01T00:00")
    issued = register.finalize("acme", "2025-01", **BY)
    check(issued)
    assert ["8.00", "9.52", "8.00", "1.52"] == [
        issued.document[name] for name in ("net", "total", "paid_in_advance", "due")
    ]
    assert "-2.00" == issued.document["adjustments"][0]["amount"]


def test_an_empty_month_is_paid_at_once(house: TestLedger, register: InvoiceRegister) -> None:
    house.clock.now_ns = at("2025-02-01T00:00")
    assert InvoiceState.PAID is register.finalize("acme", "2025-01", **BY).state


def test_a_month_is_invoiced_once_however_it_is_written(
    house: TestLedger, register: InvoiceRegister
) -> None:
    house.fund(UNITS)
    house.charge("r1", Usage(miss=500_000))
    house.clock.now_ns = at("2025-02-01T00:00")
    issued = register.finalize("acme", "2025-1", **BY)
    assert issued == register.finalize("acme", "2025-01", **BY) == register.month("acme", "2025-1")
    assert 1 == len(register.listing())


def test_an_invoice_on_which_nothing_is_due_can_still_be_void(
    house: TestLedger, register: InvoiceRegister
) -> None:
    """It was paid in advance, so it counts as paid at once. A wrong address must not remain."""
    register.apply_parties(PARTIES.format(zone="UTC").replace('rate = "19"', 'rate = "0"'), **BY)
    house.fund(UNITS)
    house.charge("r1", Usage(miss=500_000))
    house.clock.now_ns = at("2025-02-01T00:00")
    wrong = register.finalize("acme", "2025-01", **BY)
    assert InvoiceState.PAID is wrong.state
    assert InvoiceState.VOID is register.mark(wrong.number, InvoiceState.VOID, **BY).state
    assert InvoiceState.VOID is register.find(wrong.number).state is register.listing()[0].state
    with pytest.raises(InvoiceError, match="is void"):
        register.mark(wrong.number, InvoiceState.PAID, **BY)
    assert "0.50" == register.finalize("acme", "2025-01", **BY).document["net"]


def test_a_late_charge_is_on_the_next_invoice(house: TestLedger, register: InvoiceRegister) -> None:
    house.fund(UNITS)
    house.clock.now_ns = at("2025-01-31T23:59")
    late = house.reserve("late", 0)
    house.clock.now_ns = at("2025-02-01T00:00")
    first = register.finalize("acme", "2025-01", **BY)
    house.ledger.settle(late, Usage(miss=500_000), Outcome.FINISHED).result()
    house.clock.now_ns = at("2025-03-01T00:00")
    second = register.finalize("acme", "2025-02", **BY)
    assert ("0.00", "0.50") == (first.document["net"], second.document["net"])
    assert "brought_forward" == second.document["adjustments"][0]["name"]


def test_a_void_invoice_keeps_its_number_and_is_made_again(
    house: TestLedger, register: InvoiceRegister
) -> None:
    house.fund(UNITS)
    house.charge("r1", Usage(miss=500_000))
    house.clock.now_ns = at("2025-02-01T00:00")
    wrong = register.finalize("acme", "2025-01", **BY)
    register.mark(wrong.number, InvoiceState.VOID, **BY)
    right = register.finalize("acme", "2025-01", **BY)
    assert ("INV-000002", wrong.document["net"]) == (right.number, right.document["net"])
    assert [InvoiceState.FINAL, InvoiceState.VOID] == sorted(
        each.state for each in register.listing()
    )


def test_a_credit_note_tells_what_corrections_gave_back(
    house: TestLedger, register: InvoiceRegister
) -> None:
    house.fund(10 * UNITS)
    for number in range(3):
        house.charge(f"r{number}", Usage(miss=1_000_000))
    house.clock.now_ns = at("2025-02-01T00:00")
    issued = register.finalize("acme", "2025-01", **BY)
    with pytest.raises(InvoiceError, match="everything given back of INV-000001"):
        register.credit(issued.number, **BY)
    for number in range(2):
        house.ledger.correct("acme", f"r{number}", reference=f"c{number}", **BY).result()
        note = register.credit(issued.number, **BY)
        check(note)
        assert (f"CN-00000{number + 1}", "1.00", "1.19") == (
            note.number,
            note.document["net"],
            note.document["total"],
        )
    with pytest.raises(InvoiceError, match="credit note"):
        register.mark(issued.number, InvoiceState.VOID, **BY)
    house.clock.now_ns = at("2025-03-01T00:00")
    february = register.finalize("acme", "2025-02", **BY)
    assert "0.00" == february.document["net"]  # what was credited is not credited again
    part = {"reference": "c2", "amount": 123_456_789_012, **BY}
    house.ledger.correct("acme", "r2", **part).result()
    note = register.credit(issued.number, **BY)
    check(note)
    exact = [row["exact"] for row in note.document["adjustments"]]
    assert ("0.12", ["0.123456789012", "-0.003456789012"]) == (note.document["net"], exact)
    house.ledger.correct("acme", "r2", reference="c3", **BY).result()
    assert "0.88" == register.credit(issued.number, **BY).document["net"]


def test_an_invoice_behind_a_credit_note_does_not_ask_for_what_was_credited(
    house: TestLedger, register: InvoiceRegister
) -> None:
    """The correction lies in March; February is invoiced when the credit note is written."""
    house.accounts.set_credit_limit("acme", None, by="test")
    house.charge("january", Usage(miss=3_000_000))
    house.clock.now_ns = at("2025-02-10T00:00")
    january = register.finalize("acme", "2025-01", **BY)
    house.charge("february", Usage(miss=500_000))
    house.clock.now_ns = at("2025-03-10T00:00")
    house.ledger.correct("acme", "january", reference="c", **BY).result()
    assert "3.00" == register.credit(january.number, **BY).document["net"]
    february = register.finalize("acme", "2025-02", **BY)
    assert ("0.50", "0.60") == (february.document["net"], february.document["due"])
    assert [] == february.document["adjustments"]
    house.clock.now_ns = at("2025-04-10T00:00")
    assert "0.00" == register.finalize("acme", "2025-03", **BY).document["net"]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Shanghai", "America/New_York"])
def test_the_invoices_and_what_is_carried_are_the_ledger(house: TestLedger, zone: str) -> None:
    """Random charges, late ones, corrections, voids and credit notes over ten months."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    register = InvoiceRegister(house.ledger.store, clock_ns=house.clock)
    register.apply_parties(PARTIES.format(zone=zone), **BY)
    house.accounts.set_credit_limit("acme", None, by="test")
    held = []
    for number in range(120):
        house.clock.advance(dice.randrange(4 * 86_400))
        what = dice.choice(
            ("charge", "charge", "charge", "hold", "settle", "correct", "pay", "fix")
        )
        if what == "charge":
            house.charge(f"r{number}", Usage(miss=dice.randrange(10**7), output=77))
        elif what == "hold":
            held.append(house.reserve(f"r{number}", 0, ttl_s=10**9))
        elif what == "settle" and held:
            hold, usage = held.pop(dice.randrange(len(held))), Usage(miss=dice.randrange(10**7))
            house.ledger.settle(hold, usage, Outcome.FINISHED).result()
        elif what == "pay":
            kind, amount = dice.choice((Kind.GRANT, Kind.TOPUP)), dice.randrange(1, 9 * UNITS)
            house.ledger.post(Deposit("acme", kind, f"p{number}", amount, "x")).result()
        elif what == "correct":
            name, amount = f"r{dice.randrange(number + 1)}", dice.choice((None, 10**10 + 7))
            with suppress(BillingError):  # it was never charged, or given back before
                house.ledger.correct(
                    "acme", name, reference=f"c{number}", amount=amount, **BY
                ).result()
        else:
            with suppress(InvoiceError):  # it is void, or paid, or the month is not over
                change(register, dice, house.clock.now_ns)
    for month in months(house.clock.now_ns):
        register.finalize("acme", month, **BY)
    check_ledger(house, register)


def months(now_ns: int) -> list[str]:
    """Those that are over everywhere."""
    last = datetime.fromtimestamp(now_ns // NS - 86_400, UTC)
    return [f"2025-{n:02}" for n in range(1, 13) if f"2025-{n:02}" < last.strftime("%Y-%m")]


def change(register: InvoiceRegister, dice: random.Random, now_ns: int) -> None:
    known = register.listing("acme")
    what = dice.choice(("issue", "void", "credit", "paid"))
    if what == "issue" or not known:
        register.finalize("acme", dice.choice(months(now_ns) or ["2025-01"]), **BY)
    elif what == "credit":
        register.credit(dice.choice(known).number, **BY)
    else:
        register.mark(dice.choice(known).number, InvoiceState(what), **BY)


def check_ledger(house: TestLedger, register: InvoiceRegister) -> None:
    found = register.listing("acme")
    for each in found:
        check(each)
    standing = [each for each in found if each.state is not InvoiceState.VOID]
    for series in ("INV-", "CN-"):
        numbers = sorted(each.number for each in found if each.number.startswith(series))
        assert numbers == [f"{series}{n + 1:06d}" for n in range(len(numbers))]
    asked = sum(
        units(each, "net") * (1 if each.document["kind"] == "invoice" else -1) for each in standing
    )
    owed = sum(
        units(each, "owed") * (1 if each.document["kind"] == "invoice" else -1) for each in standing
    )
    spans = [
        month_days(each.document["period"]["month"])
        for each in standing
        if each.document["kind"] == "invoice"
    ]
    with house.ledger.store.reading() as connection:
        sums = month_sums(connection, "acme", spans, register.parties())
        told = {seq for each in standing for seq in each.document.get("corrections", ())}
        entries = list(audit.store_reports.stream_entries(connection, "acme"))
    # Independently: what every entry of those months moved, and what credit notes tell of later.
    moved = [e for e in entries if e.kind in (Kind.CHARGE, Kind.CORRECTION)]
    zone = register.parties().seller.zone
    covered = {each.document["period"]["month"] for each in standing if "carried" in each.document}
    mine = [
        e for e in moved if f"{datetime.fromtimestamp(e.moment_ns / NS, zone):%Y-%m}" in covered
    ]
    net = sum(-e.amount + e.amounts.get("granted", 0) for e in mine)
    assert net == sums.net
    later = sum(
        e.amount - e.amounts.get("granted", 0) for e in moved if e.seq in told and e not in mine
    )
    last = max(
        (each for each in standing if "carried" in each.document),
        key=lambda each: each.document["entries"],
    )
    after = [e for e in mine if e.seq > last.document["entries"]]
    late = sum(-e.amount + e.amounts.get("granted", 0) for e in after)
    notes = len([each for each in standing if each.document["kind"] == "credit_note"])
    left = net - later - late - asked - units(last, "carried")
    assert abs(left) <= notes * 10**10  # what rounding a credit note left since the last invoice
    told_of = [*mine, *(e for e in moved if e.seq in told and e not in mine)]
    due = sum(-e.amounts.get("receivable", 0) for e in told_of)
    assert abs(due - owed) <= (2 + notes) * 10**10


def test_what_was_issued_cannot_be_changed_in_the_database(
    house: TestLedger, register: InvoiceRegister
) -> None:
    house.clock.now_ns = at("2025-02-01T00:00")
    register.finalize("acme", "2025-01", **BY)
    for statement in (sa.update(invoices).values(text="{}"), sa.delete(invoices)):
        with (
            pytest.raises(sa.exc.DBAPIError, match="append-only"),
            house.ledger.store.writing() as connection,
        ):
            connection.execute(statement)


def test_a_tenant_without_a_buyer_and_an_unknown_number_are_said(
    house: TestLedger, register: InvoiceRegister
) -> None:
    house.accounts.create_tenant("bolt", "CNY", by="test")
    house.clock.now_ns = at("2025-02-01T00:00")
    with pytest.raises(PartiesError, match=r"add a \[\[buyer\]\]"):
        register.finalize("bolt", "2025-01", **BY)
    issued = register.finalize("acme", "2025-01", **BY)
    with pytest.raises(UnknownInvoice):
        register.find("INV-000009")
    with pytest.raises(UnknownInvoice):
        register.find(issued.number, tenant="bolt")
    with pytest.raises(PartiesError, match="time_zone was UTC"):
        register.apply_parties(PARTIES.format(zone="Asia/Tokyo"), **BY)


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ("payment_days = 14", "payment_day = 14", "did you mean 'payment_days'"),
        ("payment_days = 14", "payment_days = 1.5", "whole number"),
        ('rate = "19"', "rate = 19", "percentage in quotes"),
        ('rate = "19"', 'rate = "19.12345"', "percentage in quotes"),
        ('time_zone = "UTC"', 'time_zone = "Mars"', "not a time zone"),
        ('name = "Acme Ltd"', 'name = "Acme\\nLtd"', "U\\+000A"),
        ("[seller]", "[vendor]", "no field 'vendor'"),
        ('tax_id = "DE123456789"', 'series = "inv "', "capitals"),
        ("[[buyer]]", "[buyer]", "two brackets"),
    ],
)
def test_parties_that_are_wrong_name_the_field(was: str, becomes: str, said: str) -> None:
    text = PARTIES.format(zone="UTC")
    assert was in text
    with pytest.raises(PartiesError, match=said):
        parse_parties(text.replace(was, becomes))
