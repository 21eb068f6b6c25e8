"""Wallets in other currencies: kept apart, converted at a stated rate, and proved."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from billing.errors import (
    AlreadyExists,
    BillingError,
    InsufficientBalance,
    InvalidAmount,
    InvalidName,
    InvalidSpan,
)
from billing.gate.commands import MoveWallet
from billing.money import UNITS, format_units
from billing.operations.balance import Booking, book_deposit
from billing.operations.books import OpenBooks
from billing.proof import audit
from billing.proof.prover import Prover
from billing.reports.plans import standing
from billing.reports.receipts import ReceiptSigner
from billing.reports.statement import statement
from billing.store.opening import open_store
from billing.usage import Usage
from tests.contract.conftest import entries
from tests.contract.forging import forging, replace_in
from tests.support.billing import TestLedger, running_ledger

ECB = {"rate_date": "2024-12-31", "rate_source": "ECB"}


def pay(house: TestLedger, amount: int, reference: str = "w", currency: str = "USD") -> None:
    about = {"reference": reference, "by": "ops", "reason": "paid"}
    house.ledger.post(MoveWallet("acme", currency=currency, amount=amount, **about)).result()


def convert(house: TestLedger, amount: int, reference: str = "c", **more: Any) -> None:
    about = {"rate": "7.1", **ECB, "reference": reference, "by": "ops"} | more
    house.ledger.post(MoveWallet("acme", currency="USD", amount=-amount, **about)).result()


def wallets(house: TestLedger) -> dict[str, str]:
    found: dict[str, str] = standing(house.ledger.store, "acme", house.clock())["wallets"]
    return found


def test_a_wallet_pays_for_nothing_until_it_is_converted(house: TestLedger) -> None:
    pay(house, 100 * UNITS)
    assert {"USD": "100.00"} == wallets(house)
    with pytest.raises(InsufficientBalance):
        house.reserve("r", 1)
    convert(house, 30 * UNITS)
    assert {"USD": "70.00"} == wallets(house)
    assert 213 * UNITS == house.ledger.balance("acme").balance  # 30 x 7.1
    house.reserve("r", 213 * UNITS)
    kept = entries(house.ledger.store)[-1].details
    assert ("7.1", "2024-12-31", "ECB") == tuple(
        kept[name] for name in ("rate", "rate_date", "rate_source")
    )


def test_each_currency_has_its_wallet_and_none_goes_below_zero(house: TestLedger) -> None:
    pay(house, 5 * UNITS)
    pay(house, 8 * UNITS, "e", "EUR")
    pay(house, -2 * UNITS, "out")
    assert {"EUR": "8.00", "USD": "3.00"} == wallets(house)
    with pytest.raises(InsufficientBalance, match=r"3\.00 USD is available"):
        pay(house, -4 * UNITS, "too much")
    with pytest.raises(InsufficientBalance):
        convert(house, 4 * UNITS)
    assert {"EUR": "8.00", "USD": "3.00"} == wallets(house)


def test_a_conversion_settles_what_is_owed_first(house: TestLedger) -> None:
    house.accounts.set_credit_limit("acme", None, by="test")
    house.charge("r", Usage(output=1_000_000))
    pay(house, UNITS)
    convert(house, UNITS)
    account = house.ledger.balance("acme")
    assert (0, format_units(account.topup)) == (account.owed, "5.10")


def test_less_than_a_unit_is_dropped(house: TestLedger) -> None:
    pay(house, 10)
    convert(house, 3, rate="0.333333333333")
    assert 0 == house.ledger.balance("acme").balance
    assert {"USD": "0.000000000007"} == wallets(house)


def test_a_reference_books_once(house: TestLedger) -> None:
    for _ in range(2):
        pay(house, 10 * UNITS)
        convert(house, 4 * UNITS)
    assert {"USD": "6.00"} == wallets(house)
    with pytest.raises(AlreadyExists):
        pay(house, 11 * UNITS)
    with pytest.raises(AlreadyExists):
        convert(house, 4 * UNITS, rate="7.2")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"rate": "seven"}, InvalidAmount),
        ({"rate": "-1"}, InvalidAmount),
        ({"rate": "0"}, InvalidAmount),
        ({"rate": "NaN"}, InvalidAmount),
        ({"rate": "0.0000000000001"}, InvalidAmount),
        ({"rate_date": "yesterday"}, InvalidSpan),
        ({"rate_source": " "}, InvalidName),
    ],
)
def test_a_rate_that_says_too_little_is_refused(
    house: TestLedger, change: dict[str, str], error: type[BillingError]
) -> None:
    pay(house, UNITS)
    with pytest.raises(error):
        convert(house, UNITS, **change)
    with pytest.raises(InvalidAmount, match="no wallet"):
        pay(house, UNITS, "own", "CNY")


def test_the_statement_adds_up(house: TestLedger) -> None:
    pay(house, 10 * UNITS)
    convert(house, 10 * UNITS)
    made = statement(house.ledger.store, "acme", "2025-01")
    assert 71 * UNITS == made.closing == made.moved("conversion")


def test_one_function_books_for_command_and_route(house: TestLedger, tmp_path: Path) -> None:
    store = house.ledger.store
    signer = ReceiptSigner.open(tmp_path)
    books = OpenBooks(store, house.accounts, house.ledger, Prover(store), signer)
    about = {"tenant": "acme", "by": "ops", "why": "paid"}
    book_deposit(books, kind=Booking.TOPUP, amount="10", currency="USD", **about)
    book_deposit(books, kind=Booking.WITHDRAW, amount="1", currency="USD", **about)
    rate = {"rate": "7.1", **ECB}
    shown = book_deposit(books, kind=Booking.TOPUP, amount="4", currency="USD", **rate, **about)
    assert ("28.40", {"USD": "5.00"}) == (shown["balance"], shown["wallets"])
    with pytest.raises(InvalidName, match="give the wallet's currency"):
        book_deposit(books, kind=Booking.TOPUP, amount="4", **rate, **about)
    with pytest.raises(InvalidName, match="own currency"):
        book_deposit(books, kind=Booking.GRANT, amount="4", currency="USD", **about)


FORGED = [
    # More came in than the trail says; the forger makes all hashes anew, and the wallet's row.
    (2, {'"moves":"10000000000000"': '"moves":"90000000000000"'}, "", "decided"),
    # The rate is better, and the postings with it.
    (3, {'"rate":"7.1"': '"rate":"8"'}, "topup:32000000000000 cash:-32000000000000", "decided"),
    # The balance gets more than amount times rate.
    (3, {}, "topup:30000000000000 cash:-30000000000000", "balanced"),
    # The same sum out of a smaller amount at a better rate.
    (3, {'"rate":"7.1"': '"rate":"14.2"', '"-4000000000000"': '"-2000000000000"'}, "", "decided"),
    # More is converted than was in the wallet.
    (2, {'"moves":"10000000000000"': '"moves":"1000000000000"'}, "", "balanced"),
]  # fmt: skip


@pytest.mark.parametrize(("seq", "body", "postings", "invariant"), FORGED)
def test_a_forged_wallet_is_found(
    tmp_path: Path, seq: int, body: dict[str, str], postings: str, invariant: str
) -> None:
    path = tmp_path / "ledger"
    with running_ledger(f"sqlite:///{path}") as house:
        house.fund(UNITS)
        pay(house, 10 * UNITS)
        convert(house, 4 * UNITS)
        assert audit.verify(house.ledger.store).ok
    with forging(path) as plain:
        replace_in(plain, "body", body, seq=seq)
        if postings:
            plain.execute("UPDATE entries SET postings = ? WHERE seq = ?", (postings, seq))
    with closing(open_store(f"sqlite:///{path}")) as store:
        problems = audit.verify(store).problems
        assert invariant in {each.invariant for each in problems if each.tenant == "acme"}


def test_the_trail_of_a_wallet_is_proved(tmp_path: Path) -> None:
    """The trail tells a conversion whole, so that an entry cannot tell another."""
    path = tmp_path / "ledger"
    with running_ledger(f"sqlite:///{path}") as house:
        pay(house, 10 * UNITS)
        convert(house, 4 * UNITS)
        trail = house.accounts.trail.newest(1)[0]
        assert {
            "balance": "28.40",
            "reference": "c",
            "wallet": "USD -4.00 at 7.1 of 2024-12-31 by ECB",
        } == json.loads(trail["after"])


def test_a_wallets_row_is_proved_and_derived_again(house: TestLedger) -> None:
    pay(house, 10 * UNITS)
    store = house.ledger.store
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE wallets SET amount = 5")
    (problem,) = audit.verify(store).problems
    assert "wallet acme/USD" == problem.tenant
    assert audit.rebuild(store).ok
    assert {"USD": "10.00"} == wallets(house)
