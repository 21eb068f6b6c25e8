"""Plans: included tokens and monthly minimums, computed by hand, proved, and shown to people."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from billing.errors import MonthOpen, PriceError
from billing.gate.entries import Entry, Kind
from billing.gate.holds import Hold, RequestContext
from billing.gate.outcomes import Outcome
from billing.gate.plans import closing_ns, month_ns
from billing.gate.work import TenantAccount
from billing.invoices.register import InvoiceRegister
from billing.money import UNITS, format_units
from billing.operations.invoices import finalize_invoice
from billing.prices.book import NS, PriceBook, RateCard, Terms
from billing.prices.cards import parse_card, shipped_cards
from billing.proof import audit, rerate
from billing.reports.focus import focus_rows
from billing.reports.plans import plan_document
from billing.reports.statement import Statement, statement
from billing.reports.usage import total
from billing.store.opening import open_store
from billing.usage import Usage
from tests.contract.conftest import entries
from tests.contract.forging import forging, replace_in
from tests.contract.test_invoices import BY, PARTIES
from tests.support.billing import TestLedger, running_ledger

DAY = 86_400
CARD = """
[card]
name = "plan"
version = "{version}"
currency = "CNY"
valid_from = {valid_from}
tenants = ["acme"]
monthly_minimum = "2"

[[included]]
name = "input"
match = "small*"
classes = ["miss", "hit"]
tokens = 1000

[[included]]
name = "output"
classes = ["output"]
tokens = 10

[[model]]
match = "*"
hit = "0.5"
miss = "1"
output = "100"
"""


def card(version: str = "1", valid_from: str = "2025-01-01T00:00:00Z") -> str:
    return CARD.format(version=version, valid_from=valid_from)


@pytest.fixture
def plan(house: TestLedger) -> TestLedger:
    """The house in January, with a plan."""
    house.fund(1000 * UNITS)
    house.accounts.apply_card(parse_card(card()), by="test")
    return house


def admit(house: TestLedger, name: str, model: str = "small") -> Hold:
    pinned = house.ledger.book.at(model, house.clock(), "CNY", Terms(tenant="acme"))
    context = RequestContext(admitted_ns=house.clock())
    return house.ledger.reserve("acme", name, 0, pinned, context=context).result()


def charge(house: TestLedger, name: str, usage: Usage, model: str = "small") -> str:
    hold = admit(house, name, model)
    return format_units(house.ledger.settle(hold, usage, Outcome.FINISHED).result().charge.amount)


def close_month(house: TestLedger) -> Entry | None:
    """What the sweeper books, if anything."""
    before = len(entries(house.ledger.store))
    house.ledger._sweeper.close_months()
    after = entries(house.ledger.store)
    return after[-1] if len(after) > before else None


def test_included_tokens_cost_nothing_until_they_are_spent(plan: TestLedger) -> None:
    # All 600 computed tokens, then 400 of the 900 hits; 500 hits at 0.5 a million.
    assert "0.00" == charge(plan, "r1", Usage(miss=600))
    assert "0.00025" == charge(plan, "r2", Usage(hit_disk=900))
    # Nothing is left of the input; of the output, 10 of 12.
    assert "0.0003" == charge(plan, "r3", Usage(miss=100, output=12))
    # The input's item is for small models only; the output's is for all, and spent.
    assert "0.0011" == charge(plan, "r4", Usage(miss=100, output=10), model="large")
    shown = plan_document(plan.ledger.store, "acme", plan.clock())
    assert [0, 0] == [item["left"] for item in shown["included"]]
    assert ("2.00", "0.00165") == (shown["minimum"], shown["charged"])


def test_a_new_month_resets_the_count_and_a_new_version_does_not(plan: TestLedger) -> None:
    assert "0.0001" == charge(plan, "r1", Usage(miss=1100))
    later = card("2", "2025-01-10T00:00:00Z").replace("tokens = 1000", "tokens = 1500")
    plan.accounts.apply_card(parse_card(later), by="test")
    plan.clock.advance(10 * DAY)
    assert "0.0001" == charge(plan, "r2", Usage(miss=600))  # 500 more than version 1 had
    plan.clock.advance(25 * DAY)
    assert "0.00" == charge(plan, "r3", Usage(miss=1500))


def test_a_request_belongs_to_the_month_of_its_admission(plan: TestLedger) -> None:
    hold = admit(plan, "long")
    plan.clock.advance(31 * DAY)
    assert "0.00" == charge(plan, "r1", Usage(miss=1000))
    settled = plan.ledger.settle(hold, Usage(miss=1000), Outcome.FINISHED).result()
    assert 0 == settled.charge.amount


def test_a_late_word_takes_what_it_needs_and_gives_the_rest_back(plan: TestLedger) -> None:
    hold = admit(plan, "slow")
    plan.ledger.top_up(hold, usage=Usage(miss=400, output=4)).result()
    plan.clock.advance(300)
    plan.ledger._leases.clear()
    assert 1 == plan.ledger.sweep()  # lapsed: presumed from its progress
    used = plan_document(plan.ledger.store, "acme", plan.clock())["included"]
    assert [600, 6] == [item["left"] for item in used]
    settled = plan.ledger.settle(hold, Usage(miss=100, output=11), Outcome.FINISHED).result()
    assert ("0.0001", True) == (format_units(settled.charge.amount), settled.repeated)
    used = plan_document(plan.ledger.store, "acme", plan.clock())["included"]
    assert [900, 0] == [item["left"] for item in used]


def test_a_month_below_the_minimum_is_raised_to_it_once(plan: TestLedger) -> None:
    charge(plan, "r1", Usage(miss=501_000))  # 0.50 beyond the included
    plan.clock.advance(31 * DAY)
    assert close_month(plan) is None  # six hours for what still runs
    plan.clock.advance(6 * 3600)
    booked = close_month(plan)
    assert booked is not None
    assert ("minimum:2025-01", "1.50") == (booked.request_id, format_units(-booked.amount))
    assert month_ns("2025-01")[0] < booked.moment_ns < month_ns("2025-01")[1]
    assert close_month(plan) is None
    plan.ledger._sweeper._closed.clear()  # as after a restart
    assert close_month(plan) is None
    (periods,) = total(plan.ledger.store, "acme")
    assert (1, "2.00", "1.50") == (
        periods.requests,
        format_units(periods.amount),
        format_units(periods.fees),
    )


def test_a_month_above_the_minimum_costs_no_more(plan: TestLedger) -> None:
    charge(plan, "r1", Usage(miss=2_001_001))
    plan.clock.advance(32 * DAY)
    booked = close_month(plan)
    assert booked is not None
    assert 0 == booked.amount


def test_a_card_from_the_middle_of_a_month_binds_from_the_next(house: TestLedger) -> None:
    house.fund(UNITS)
    middle = card(valid_from="2025-01-02T00:00:00Z")
    house.accounts.apply_card(parse_card(middle), by="test")
    house.clock.advance(32 * DAY)
    assert close_month(house) is None
    house.clock.advance(28 * DAY)
    booked = close_month(house)
    assert booked is not None
    assert "minimum:2025-02" == booked.request_id


def test_a_minimum_binds_from_the_first_full_month_of_card_and_tenant(house: TestLedger) -> None:
    """A card with an old `valid_from` bills nothing for months before it was applied, and a new
    tenant nothing for months before it existed."""
    house.clock.advance(45 * DAY)
    both = card().replace('["acme"]', '["acme", "young"]')
    house.accounts.apply_card(parse_card(both), by="test")
    house.clock.advance(20 * DAY)  # March
    house.accounts.create_tenant("young", "CNY", by="test")
    house.ledger._sweeper.close_months()
    assert 0 == len(entries(house.ledger.store)) + len(entries(house.ledger.store, "young"))
    house.clock.advance(30 * DAY)  # April
    house.ledger._sweeper.close_months()
    assert ["minimum:2025-03"] == [each.request_id for each in entries(house.ledger.store)]
    assert [] == entries(house.ledger.store, "young")
    house.clock.advance(30 * DAY)
    house.ledger._sweeper.close_months()
    booked = [each.request_id for each in entries(house.ledger.store, "young")]
    assert ["minimum:2025-04"] == booked


def test_a_card_that_is_applied_later_changes_no_minimum_of_before(plan: TestLedger) -> None:
    plan.clock.advance(32 * DAY)
    assert close_month(plan) is not None
    later = card("2", "2025-01-01T00:00:00.001Z").replace('= "2"\n\n', '= "9"\n\n')
    plan.accounts.apply_card(parse_card(later), by="test")
    plan.ledger._sweeper._closed.clear()
    assert close_month(plan) is None  # proved by the fixture


def test_a_minimum_of_an_earlier_version_that_bound_nobody_is_named(
    house: TestLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof says to give it back, proves the rest of the chain, and is content then."""
    house.clock.advance(32 * DAY)
    house.accounts.apply_card(parse_card(card()), by="test")

    def before(book: PriceBook, account: TenantAccount, month: str) -> RateCard | None:
        return book.in_force(closing_ns(month), account.currency, account.tenant)

    with monkeypatch.context() as earlier:
        earlier.setattr("billing.gate.plans.committing_card", before)
        assert close_month(house) is not None
    house.fund(5 * UNITS)
    problems = audit.verify(house.ledger.store).problems
    assert [("acme", 1, "rated")] == [(p.tenant, p.seq, p.invariant) for p in problems]
    assert "ledger correct acme minimum:2025-01" in problems[0].message
    back = {"reference": "back", "by": "test", "reason": "never agreed"}
    house.ledger.correct("acme", "minimum:2025-01", **back).result()
    assert 5 * UNITS == house.accounts.tenant("acme").balance


def test_a_plan_says_what_a_minimum_would_add(house: TestLedger) -> None:
    house.fund(UNITS)
    house.clock.advance(20 * DAY)
    pinned = house.ledger.book.at("small", house.clock(), "CNY")
    context = RequestContext(admitted_ns=house.clock())
    held = house.ledger.reserve("acme", "r", 0, pinned, context=context).result()
    house.ledger.settle(held, Usage(miss=500_000), Outcome.FINISHED).result()
    house.clock.advance(20 * DAY)
    store, tried = house.ledger.store, parse_card(card())
    (found,) = rerate.minimums(store, tried, house.clock())
    assert ("2025-03", "2025-01") == (found.binds_from, found.month)
    assert ("0.50", "1.50") == (format_units(found.planned), format_units(found.missing))
    house.accounts.apply_card(tried, by="test")
    house.clock.advance(60 * DAY)
    applied = house.ledger.book.card("plan", "1")
    assert "2025-03" == rerate.minimums(store, applied, house.clock())[0].binds_from
    assert [] == rerate.minimums(store, applied, house.clock(), "other")


def test_statement_and_invoice_say_what_a_plan_did(plan: TestLedger) -> None:
    charge(plan, "r1", Usage(miss=501_000, output=20))
    plan.clock.advance(32 * DAY)
    close_month(plan)
    lines = {line.label: format_units(line.amount) for line in january(plan).lines}
    assert lines == {
        "Prompt, computed": "0.501",
        "Output": "0.002",
        "Prompt, computed, included": "-0.001",
        "Output, included": "-0.001",
        "Up to the minimum of the month": "1.499",
    }
    included = [line for line in january(plan).lines if line.name.startswith("included_")]
    assert [(-1000, "1.00"), (-10, "100.00")] == [(line.tokens, line.rate) for line in included]
    assert 2 * UNITS == january(plan).exact == january(plan).total
    register = InvoiceRegister(plan.ledger.store, clock_ns=plan.clock)
    register.apply_parties(PARTIES.format(zone="Europe/Berlin"), **BY)
    invoice = register.finalize("acme", "2025-01", **BY).document
    labels = {line["label"]: line["exact"] for line in invoice["lines"]}
    assert "1.499" == labels["Up to the minimum of the month"]
    assert "2.00" == invoice["net"]


def test_an_invoice_closes_its_month_or_waits_for_it(plan: TestLedger) -> None:
    """Within six hours after the month it is refused; then it books the minimum itself."""
    charge(plan, "r1", Usage(miss=501_000))
    plan.clock.advance(31 * DAY + 3600)
    register = InvoiceRegister(plan.ledger.store, clock_ns=plan.clock)
    register.apply_parties(PARTIES.format(zone="Europe/Berlin"), **BY)
    with pytest.raises(MonthOpen, match=r"booked once .* at 2025-02-01 06:00 UTC"):
        register.finalize("acme", "2025-01", **BY)
    assert plan.ledger.close_month("acme", "2025-01").result() is None
    plan.clock.advance(6 * 3600)
    with pytest.raises(MonthOpen):  # the sweeper was not there yet
        register.finalize("acme", "2025-01", **BY)
    assert plan.ledger.close_month("acme", "2025-01").result() is not None
    assert "2.00" == register.finalize("acme", "2025-01", **BY).document["net"]


def test_the_command_that_issues_an_invoice_closes_the_month(
    plan: TestLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("billing.invoices.register.time.time_ns", plan.clock)
    register = InvoiceRegister(plan.ledger.store)
    monkeypatch.setattr(register, "_clock_ns", plan.clock)
    register.apply_parties(PARTIES.format(zone="UTC"), **BY)
    books: Any = SimpleNamespace(
        store=plan.ledger.store, accounts=plan.accounts, ledger=plan.ledger
    )
    plan.clock.advance(32 * DAY)
    issued = finalize_invoice(books, tenant="acme", month="2025-1", by="eve", why="test")
    assert ("2.00", "final") == (issued["net"], issued["state"])
    kinds = [each.request_id for each in entries(plan.ledger.store) if each.kind is Kind.CHARGE]
    assert ["minimum:2025-01"] == kinds
    again = finalize_invoice(books, tenant="acme", month="2025-01", by="eve", why="test")
    assert issued["number"] == again["number"]


def january(house: TestLedger) -> Statement:
    return statement(house.ledger.store, "acme", "2025-01")


def test_exports_add_up(plan: TestLedger) -> None:
    charge(plan, "r1", Usage(miss=1500, output=20))
    plan.clock.advance(32 * DAY)
    close_month(plan)
    charges = [entry for entry in entries(plan.ledger.store) if entry.kind is Kind.CHARGE]
    rows = list(focus_rows(charges, plan.ledger.book, {}))
    assert 2 == sum(float(row["BilledCost"]) for row in rows)
    prices = {(row["SkuPriceId"], row["ContractedUnitPrice"]) for row in rows}
    ids = [price for price, _ in prices if "monthly_minimum" not in price]
    assert len(ids) == len(set(ids))


FORGED = [
    # Takes 900 included tokens where 400 were left, and pays 250 units of price less.
    ("r2", {'"input":400': '"input":900'}, {}),
    ("r2", {'"included":{"input":400},': "", '"included_amount":"200000000",': ""}, {}),
    ("minimum:2025-01", {'"fees":"1999750000000"': '"fees":"1000000000000"'},
     {"1999750000000": "1000000000000"}),
    ("minimum:2025-01", {'"commitment":"2025-01"': '"commitment":"2025-02"'}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("request_id", "body", "postings"), FORGED)
def test_a_forged_plan_is_found(
    tmp_path: Path, request_id: str, body: dict[str, str], postings: dict[str, str]
) -> None:
    """The forger recomputes every hash and everything derived from it."""
    path = tmp_path / "ledger"
    with running_ledger(f"sqlite:///{path}") as house:
        house.fund(1000 * UNITS)
        house.accounts.apply_card(parse_card(card()), by="test")
        charge(house, "r1", Usage(miss=600))
        charge(house, "r2", Usage(hit_disk=900))
        house.clock.advance(32 * DAY)
        close_month(house)
        assert audit.verify(house.ledger.store).ok
    with forging(path) as plain:
        replace_in(plain, "body", body, request_id=request_id)
        replace_in(plain, "postings", postings, request_id=request_id)
    with closing(open_store(f"sqlite:///{path}")) as store:
        problems = audit.verify(store).problems
        assert ("acme", "rated") in {(each.tenant, each.invariant) for each in problems}


def test_spent_tokens_are_projected_and_derived_again(plan: TestLedger) -> None:
    charge(plan, "r1", Usage(miss=600))
    store = plan.ledger.store
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE included_used SET tokens = 5")
    (problem,) = audit.verify(store).problems
    assert "included_used acme/2025-01/plan/input" == problem.tenant
    assert audit.rebuild(store).ok


def test_the_shipped_plan_by_hand(house: TestLedger) -> None:
    """9 million computed and 4 million hits of a small model: 1 million hits are included, so 3
    million at 0.25; 3 million of output, 2 of them at 4."""
    text = shipped_cards()["monthly-plan"].replace("example-customer", "acme")
    house.accounts.create_tenant("payer", "USD", credit_limit=None, by="test")
    house.accounts.apply_card(parse_card(text.replace('"acme"', '"payer"')), by="test")
    pinned = house.ledger.book.at("small-1", house.clock(), "USD", Terms(tenant="payer"))
    hold = house.ledger.reserve("payer", "r", 0, pinned).result()
    million = 10**6
    usage = Usage(miss=9 * million, hit_disk=4 * million, output=3 * million)
    settled = house.ledger.settle(hold, usage, Outcome.FINISHED).result()
    assert "8.75" == format_units(settled.charge.amount)
    lines = {line.name: line.tokens for line in settled.charge.lines}
    assert (-9 * million, -million, -million) == (
        lines["included_miss"],
        lines["included_hit_disk"],
        lines["included_output"],
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('tenants = ["acme"]\n', ""), "a monthly_minimum needs 'tenants'"),
        (("tokens = 1000", "tokens = 0"), "a whole number above zero"),
        (('["miss", "hit"]', '["miss", "hit", "hit_disk"]'), "each once"),
        (('["miss", "hit"]', '["storage"]'), "each once, of hit"),
        (('name = "output"', 'name = "input"'), "the same name"),
        (("tokens = 10\n", "tokens = 10\nper = 1\n"), "unknown field 'per'"),
        (('monthly_minimum = "2"', 'monthly_minimum = "-2"'), "is not an amount"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change: tuple[str, str], said: str) -> None:
    assert change[0] in card()
    with pytest.raises(PriceError, match=said):
        parse_card(card().replace(*change))


def test_clock(plan: TestLedger) -> None:
    """A clock that is months ahead closes nothing twice, and nothing that has not ended."""
    plan.clock.advance(70 * DAY)
    booked = close_month(plan)
    assert booked is not None
    assert "minimum:2025-02" == booked.request_id
    plan.clock.now_ns -= 60 * DAY * NS
    assert close_month(plan) is None
