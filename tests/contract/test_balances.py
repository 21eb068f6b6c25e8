"""Money out, and deposits put right: withdrawals, chargebacks, adjustments."""

import pytest

from billing.errors import (
    AlreadyExists,
    InsufficientBalance,
    InvalidAmount,
    InvalidName,
    UnknownDeposit,
)
from billing.gate.commands import Adjust, Deposit
from billing.gate.entries import Entry, Kind
from billing.gate.work import SYSTEM
from billing.money import UNITS
from billing.usage import Usage
from tests.contract.conftest import entries
from tests.support.billing import TestLedger

USAGE = Usage(hit_disk=900, miss=100, output=7)  # launch card: 204,000,000 units
PRICE = 204_000_000
BY = {"by": "ops", "reason": "as agreed"}


def test_what_is_neither_spent_nor_held_can_be_paid_out(house: TestLedger) -> None:
    house.fund(UNITS)
    house.deposit(Kind.GRANT, UNITS, "g")
    house.reserve("r1", UNITS + 10)  # beyond what was granted
    with pytest.raises(InsufficientBalance, match="available to tenant 'acme'"):
        house.deposit(Kind.WITHDRAWAL, UNITS - 9, "w")
    house.deposit(Kind.WITHDRAWAL, UNITS - 10, "w")
    account = house.account()
    assert (account.granted, account.topup, account.owed) == (UNITS, 10, 0)
    assert entries(house.ledger.store)[-1].kind is Kind.WITHDRAWAL


@pytest.mark.parametrize("kind", [Kind.TOPUP, Kind.WITHDRAWAL])
def test_money_is_booked_once_for_its_reference(house: TestLedger, kind: Kind) -> None:
    house.fund(UNITS)
    assert house.deposit(kind, 5, "w") == house.deposit(kind, 5, "w")
    with pytest.raises(AlreadyExists):
        house.deposit(kind, 6, "w")
    assert house.account().topup - UNITS == (5 if kind is Kind.TOPUP else -5)


def test_what_was_spent_of_a_payment_that_is_taken_back_is_owed(house: TestLedger) -> None:
    house.fund(UNITS)
    house.charge("r1", USAGE)
    house.deposit(Kind.CHARGEBACK, UNITS, "cb")
    account = house.account()
    assert (account.topup, account.owed) == (0, PRICE)
    house.fund(UNITS)
    assert house.account().topup == UNITS - PRICE


def adjust(house: TestLedger, amount: int, reference: str, deposit: str = "p1") -> Entry:
    return house.ledger.post(Adjust("acme", deposit, reference, amount, **BY)).result()


@pytest.mark.parametrize("kind", [Kind.TOPUP, Kind.GRANT])
def test_a_mistyped_deposit_is_put_right(house: TestLedger, kind: Kind) -> None:
    house.deposit(kind, 1000 * UNITS, "p1")
    house.charge("r1", USAGE)
    assert adjust(house, 100 * UNITS, "a1") == adjust(house, 100 * UNITS, "a1")
    assert house.account().balance == 100 * UNITS - PRICE
    adjust(house, 0, "a2")
    assert house.account().owed == PRICE
    adjust(house, UNITS, "a3")
    assert house.account().balance == UNITS - PRICE


def test_an_adjustment_needs_a_deposit_and_a_difference(house: TestLedger) -> None:
    house.fund(UNITS)
    with pytest.raises(UnknownDeposit, match="no top-up and no grant with reference 'other'"):
        adjust(house, 1, "a", "other")
    with pytest.raises(InvalidAmount, match=r"already 1\.00 CNY"):
        adjust(house, UNITS, "a", "fund-0")


def test_nobody_books_money_under_the_servers_own_name(house: TestLedger) -> None:
    house.fund(UNITS)
    house.charge("r1", USAGE)
    as_system = {"by": SYSTEM, "reason": "x"}
    for booked in (
        house.ledger.post(Deposit("acme", Kind.TOPUP, amount=1, reference="d", **as_system)),
        house.ledger.post(Adjust("acme", "fund-0", amount=1, reference="a", **as_system)),
        house.ledger.correct("acme", "r1", reference="c", **as_system),
    ):
        with pytest.raises(InvalidName, match="say who decides"):
            booked.result()


@pytest.mark.parametrize("prefix", ["", "cmpl-", "chatcmpl-", "resp_", "msg_"])
def test_a_request_is_found_by_the_id_of_its_answer(house: TestLedger, prefix: str) -> None:
    house.fund(UNITS)
    house.charge("r1", USAGE)
    given = house.ledger.correct("acme", f"{prefix}r1", reference="c1", amount=5, **BY).result()
    assert (given.amount, given.details["corrects"]) == (5, 2)
