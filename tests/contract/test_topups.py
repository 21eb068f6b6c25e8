"""A balance that falls too low asks for a top-up: once, however messages and servers fail."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from billing.alerts.budgets import BudgetSpan, BudgetWatch, all_budgets
from billing.alerts.outbox import FIRST_RETRY_NS, Outbox
from billing.errors import InvalidAmount, InvalidName
from billing.gate.commands import Deposit
from billing.gate.entries import Kind
from billing.money import UNITS
from billing.operations.balance import Booking, book_deposit
from billing.operations.books import OpenBooks
from billing.operations.budgets import set_budget
from billing.proof import audit
from billing.proof.prover import Prover
from billing.reports.receipts import ReceiptSigner
from billing.usage import Usage
from tests.contract.conftest import entries
from tests.contract.test_alerts import SECRET, Receiver
from tests.support.billing import TestLedger


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def books(house: TestLedger, tmp_path: Any) -> OpenBooks:
    prover = Prover(house.ledger.store)
    signer = ReceiptSigner.open(tmp_path)
    return OpenBooks(house.ledger.store, house.accounts, house.ledger, prover, signer)


def ask(books: OpenBooks, name: str = "refill", **more: Any) -> None:
    about = {"name": name, "tenant": "acme", "amount": "20", "per": BudgetSpan.TOPUP}
    set_budget(books, **about | {"ask": "100", "by": "ops", "why": "agreed"} | more)


def pay(books: OpenBooks, reference: str, amount: str = "100") -> None:
    about = {"reference": reference, "by": "shop", "why": "paid by card"}
    book_deposit(books, tenant="acme", kind=Booking.TOPUP, amount=amount, **about)


def spend(house: TestLedger, name: str, amount: int) -> None:
    house.charge(name, Usage(miss=amount * 1_000_000))


def wanted(watch: BudgetWatch, house: TestLedger) -> list[str]:
    return [alert.id for alert in watch.look(house.clock())]


def test_each_fall_asks_once_and_a_restart_asks_for_the_same(
    house: TestLedger, books: OpenBooks
) -> None:
    house.fund(30 * UNITS)
    ask(books)
    watch = BudgetWatch(house.ledger.store)
    assert [] == wanted(watch, house)
    spend(house, "r1", 11)
    (alert,) = watch.look(house.clock())
    assert ("topup/acme/refill/1/1", "cachesvc.topup.wanted.v1") == (alert.id, alert.type)
    told = {k: alert.data[k] for k in ("tenant", "ask", "balance", "reference", "amount")}
    assert ["acme", "100.00", "19.00", alert.id, "20.00"] == list(told.values())
    spend(house, "r2", 1)
    house.ledger.post(
        Deposit("acme", Kind.GRANT, amount=UNITS // 2, reference="gift", by="ops")
    ).result()
    later = BudgetWatch(house.ledger.store)
    assert [alert.id] == wanted(watch, house) == wanted(later, house)
    pay(books, alert.id)
    assert [] == wanted(watch, house) == wanted(later, house)
    spend(house, "r3", 100)
    again = wanted(BudgetWatch(house.ledger.store), house)
    assert again == wanted(watch, house) == ["topup/acme/refill/5/1"]


def test_a_top_up_that_was_too_small_asks_again(house: TestLedger, books: OpenBooks) -> None:
    house.accounts.set_credit_limit("acme", None, by="ops")
    ask(books)
    spend(house, "r1", 150)
    watch = BudgetWatch(house.ledger.store)
    assert ["topup/acme/refill/0/1"] == wanted(watch, house)
    pay(books, "of its own accord", "1")
    assert ["topup/acme/refill/0/1"] == wanted(watch, house)  # still to come
    pay(books, "topup/acme/refill/0/1")
    assert ["topup/acme/refill/0/2"] == wanted(watch, house)
    pay(books, "topup/acme/refill/0/2")
    assert [] == wanted(watch, house)


def test_a_suspended_tenant_asks_for_nothing(house: TestLedger, books: OpenBooks) -> None:
    ask(books)
    house.accounts.set_suspended("acme", True, by="ops")
    assert [] == wanted(BudgetWatch(house.ledger.store), house)


def test_what_such_a_budget_must_say(house: TestLedger, books: OpenBooks) -> None:
    with pytest.raises(InvalidAmount, match="only a budget per topup"):
        ask(books, ask="")
    with pytest.raises(InvalidAmount, match="only a budget per topup"):
        ask(books, per=BudgetSpan.MONTH)
    with pytest.raises(InvalidAmount, match="1 to 100 times a day, not 101"):
        ask(books, most=101)
    with pytest.raises(InvalidName):
        ask(books, value="ann", of="user")
    ask(books, most=7)
    (budget,) = all_budgets(house.ledger.store)
    assert (100 * UNITS, 7) == (budget.ask, budget.most)


@pytest.mark.parametrize("seed", range(4))
def test_every_fall_is_paid_once_by_a_receiver_that_loses_repeats_and_reorders(
    house: TestLedger, books: OpenBooks, receiver: Receiver, seed: int
) -> None:
    """The seller books what it hears of, late, twice and in any order; two servers ask."""
    draw = random.Random(seed)
    ask(books, most=3)
    store, heard = house.ledger.store, []
    day = 86_400
    for step in range(60):
        house.clock.advance(draw.randrange(day // 8))
        watch = BudgetWatch(store)  # a restart at each step
        outbox = Outbox(store, receiver.url, SECRET, source="s")
        for _ in range(2):
            outbox.take(watch.look(house.clock()), house.clock())
        receiver.answers = draw.choices([204, 503, 0], k=2)
        outbox.deliver(house.clock())
        heard += [json.loads(body)["data"] for _, body in receiver.got]
        receiver.got.clear()
        for data in draw.sample(heard, draw.randrange(len(heard) + 1)):
            pay(books, data["reference"], data["ask"])
        balance = house.accounts.tenant("acme").balance // UNITS
        if balance > 0:
            spend(house, f"r{step}", draw.randrange(balance + 1))
        outbox.deliver(house.clock() + FIRST_RETRY_NS)
    paid = [e for e in entries(store) if e.kind is Kind.TOPUP]
    assert len(paid) == len({e.request_id for e in paid}) > 3
    assert {e.request_id for e in paid} <= {data["reference"] for data in heard}
    assert {"1"} == {e.request_id.split("/")[-1] for e in paid}  # each was enough
    falls = [int(e.request_id.split("/")[-2]) for e in paid]
    assert len(set(falls)) == len(falls)
    assert audit.verify(store).problems == []


def test_a_day_asks_no_more_often_than_agreed(house: TestLedger, books: OpenBooks) -> None:
    ask(books, most=2)
    outbox = Outbox(house.ledger.store, "http://127.0.0.1:9/", SECRET, source="s")
    watch, asked = BudgetWatch(house.ledger.store), []
    for number in range(5):
        alerts = watch.look(house.clock())
        outbox.take(alerts, house.clock())
        asked += [alert.id for alert in alerts]
        for alert in alerts:
            pay(books, alert.id)
        spend(house, f"r{number}", house.accounts.tenant("acme").balance // UNITS)
    assert 2 == len(asked)
    house.clock.advance(86_400)
    assert 1 == len(wanted(watch, house))
