"""A month as a finance person recomputes it: ledger, statement, CSV and FOCUS agree.

Three customers: acme has a card of its own and a grant, and pays in advance; bolt pays in dollars,
by prices that depend on the length of the prompt;
cato pays later, by windows, service tiers, a fee and a minimum. Everything is computed again with
decimals by the independent rater, or here.
"""

import csv
import io
import random
import tomllib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import ROUND_HALF_EVEN, Decimal

import pytest

from billing.gate.commands import Deposit
from billing.gate.entries import Kind
from billing.gate.holds import RequestContext
from billing.money import UNITS
from billing.prices.book import Terms
from billing.prices.cards import parse_card, shipped_cards
from billing.proof import audit
from billing.reports.focus import corrected_instants, focus_csv, focus_rows
from billing.reports.statement import statement, statement_csv, statement_json
from billing.usage import Usage
from tests.contract.test_independent_rater import Card, cost
from tests.support.billing import card_text, entries_of, priced, running_ledger

BEGINS = {"valid_from": "2024-12-31T00:00:00Z"}
OWN = {"tenants": ["acme"], "factors": {"batch": "0.5"}}
PLAN = card_text("acme-plan", priced("*", "0.4", "4", "16"), **OWN, **BEGINS)
LIST = card_text(
    "list",
    priced("*", "0.5", "5", "20", request="0.003", minimum="0.01", night={"miss": "3"}),
    time_zone="Asia/Shanghai",
    minimum_cached_tokens=64,
    window=("night", "23:00", "07:30"),
    factors={"flex": "0.5"},
    **BEGINS,
)
CENT = Decimal("0.01")


@dataclass
class Sheet:
    """A customer on the spreadsheet. Amounts in the currency."""

    cards: list[Card]
    free: Decimal = Decimal(0)  # granted
    paid: Decimal = Decimal(0)
    owed: Decimal = Decimal(0)
    charged: Decimal = Decimal(0)
    discount: Decimal = Decimal(0)  # what grants paid
    requests: dict[str, dict[str, Decimal]] = field(default_factory=dict)

    def charge(self, name, tenant, model, at, used, service):
        amount = cost(self.cards, tenant, model, at, used.record(), (used.prompt, service))
        free = min(self.free, amount)
        paid = min(self.paid, amount - free)
        owed = amount - free - paid
        self.free, self.paid, self.owed = self.free - free, self.paid - paid, self.owed + owed
        self.charged, self.discount = self.charged + amount, self.discount + free
        self.requests[name] = {"all": amount, "granted": free, "owed": owed}


def rounded(amount):
    return amount.quantize(CENT, ROUND_HALF_EVEN)


def traffic(draw):
    miss = draw.choice([1, 700, 3_001, 90_000, 210_000])
    hit = draw.choice([0, 63, 64, 5_000, 150_000])
    return Usage(hit_host=hit // 3, hit_disk=hit - hit // 3, miss=miss, output=draw.randrange(900))


@pytest.fixture(scope="module")
def month(tmp_path_factory):
    long_prompts = shipped_cards()["long-prompts"].replace("2025-06-01", "2024-12-31")
    texts = {"acme": [PLAN, LIST], "bolt": [long_prompts], "cato": [LIST]}
    path = tmp_path_factory.mktemp("month") / "ledger"
    draw = random.Random(17)
    with running_ledger(f"sqlite:///{path}") as house:
        for text in (PLAN, LIST, long_prompts):
            house.accounts.apply_card(parse_card(text), by="ops")
        house.accounts.create_tenant("bolt", "USD", by="ops")
        house.accounts.create_tenant("cato", "CNY", credit_limit=None, by="ops")
        sheets = {
            name: Sheet([tomllib.loads(text, parse_float=Decimal) for text in cards])
            for name, cards in texts.items()
        }
        deposits(house, sheets)
        for number in range(240):
            house.clock.advance(draw.randrange(2 * 31 * 86_400 // 241))
            tenant, name = draw.choice(["acme", "bolt", "cato"]), f"r{number}"
            model, service = draw.choice(["chat-1", "embed"]), draw.choice(["", "batch", "flex"])
            used, at = traffic(draw), datetime.fromtimestamp(house.clock() // 10**9, UTC)
            terms = Terms(tenant=tenant, prompt_tokens=used.prompt, service=service)
            currency = house.account(tenant).currency
            pinned = house.ledger.book.at(model, house.clock(), currency, terms)
            context = RequestContext(admitted_ns=house.clock(), user=draw.choice(["ann", "bob"]))
            hold = house.ledger.reserve(tenant, name, 0, pinned, context=context).result()
            house.settle(hold, used)
            sheets[tenant].charge(name, tenant, model, at, used, service)
        assert house.clock() < at_ns("2025-02-01")
        yield house, sheets
        assert audit.verify(house.ledger.store).problems == []


def at_ns(day):
    return int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()) * 10**9


def deposits(house, sheets):
    grant = Deposit("acme", Kind.GRANT, "hello", 9 * UNITS, by="ops")
    house.ledger.post(grant).result()
    house.fund(900 * UNITS, "acme")
    house.fund(300 * UNITS, "bolt")
    sheets["acme"].free, sheets["acme"].paid = Decimal(9), Decimal(900)
    sheets["bolt"].paid = Decimal(300)


NAMES = ("acme", "bolt", "cato")


@pytest.mark.parametrize("tenant", NAMES)
def test_balances_are_the_spreadsheets(month, tenant):
    house, sheets = month
    sheet, account = sheets[tenant], house.account(tenant)
    assert [sheet.free, sheet.paid] == [
        Decimal(n) / UNITS for n in (account.granted, account.topup)
    ]
    assert sheet.owed == Decimal(account.owed) / UNITS
    assert sheet.charged > 5, "too little to tell"


def test_every_kind_of_money_was_used(month):
    sheets = month[1]
    assert 9 == sheets["acme"].discount  # the grant to the last unit
    assert sheets["cato"].owed == sheets["cato"].charged
    least = [r["all"] for r in sheets["cato"].requests.values()]
    assert Decimal("0.01") in least and Decimal("0.005") in least  # the minimum, and in flex


@pytest.mark.parametrize("tenant", NAMES)
def test_the_statement_and_its_csv_add_up_to_it(month, tenant):
    house, sheets = month
    made = statement(house.ledger.store, tenant, "2025-01")
    sheet, told = sheets[tenant], statement_json(made)
    assert sheet.charged == Decimal(told["exact"])
    assert sheet.charged == sum(Decimal(line["amount"]) for line in told["lines"])
    balance = Decimal(house.account(tenant).balance) / UNITS
    assert [0, balance] == [Decimal(told[f"{name}_balance"]) for name in ("opening", "closing")]
    rows = list(csv.DictReader(io.StringIO(statement_csv(made))))
    assert sheet.charged == sum(Decimal(row["amount"]) for row in rows if row["amount"])
    whole = sum(Decimal(row["rounded"]) for row in rows if row["rounded"])
    assert rounded(sheet.charged) == Decimal(told["total"]) == whole
    by_user = statement(house.ledger.store, tenant, "2025-01", breakdown="user")
    parts = csv.DictReader(io.StringIO(statement_csv(by_user)))
    assert sheet.charged == sum(Decimal(row["amount"]) for row in parts)


@pytest.mark.parametrize("tenant", NAMES)
def test_focus_rows_add_up_to_each_request(month, tenant):
    house, sheets = month
    booked = entries_of(house.ledger.store, tenant)
    instants = corrected_instants(house.ledger.store, booked)
    data = focus_csv(focus_rows(booked, house.ledger.book, instants)).decode()
    sums = {}
    granted = {}
    for row in csv.DictReader(io.StringIO(data)):
        assert row["BillingCurrency"] == house.account(tenant).currency
        name = row["x_RequestId"]
        into = granted if row["ChargeCategory"] == "Credit" else sums
        into[name] = into.get(name, Decimal(0)) + Decimal(row["BilledCost"])
        price, count = row["ContractedUnitPrice"], row["PricingQuantity"]
        if price:
            assert Decimal(price) * Decimal(count) == Decimal(row["BilledCost"]), row
    requests = sheets[tenant].requests
    assert {name: each["all"] for name, each in requests.items()} == sums
    paid = {name: -each["granted"] for name, each in requests.items() if each["granted"]}
    assert paid == granted
