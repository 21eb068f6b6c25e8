"""Money in and out: grants that expire, withdrawals, chargebacks, and deposits put right."""

import pytest

from billing import errors
from billing.gate.commands import Adjust, Deposit
from billing.gate.entries import Entry, Kind
from billing.gate.work import SYSTEM
from billing.money import UNITS
from billing.prices.book import NS
from billing.proof import audit
from billing.reports.standing import end_of, grant_documents
from billing.usage import Usage
from tests.support.billing import PRICE, START_NS, USAGE, TestLedger, entries_of

DAY_NS = 86_400 * NS


def give(house: TestLedger, name: str, amount: int, days: int = 0) -> Entry:
    expires_ns = START_NS + days * DAY_NS if days else 0
    return house.deposit(Kind.GRANT, amount * UNITS, name, expires_ns=expires_ns)


def spend(house: TestLedger, name: str, amount: int) -> None:
    house.charge(name, Usage(miss=amount * 1_000_000))  # 1 CNY each


def left(house: TestLedger) -> dict[str, str]:
    return {each["reference"]: each["left"] for each in grant_documents(house.ledger.store, "acme")}


def test_what_expires_first_is_spent_first_whichever_came_first(house):
    give(house, "forever", 10)
    give(house, "long", 10, days=30)
    spend(house, "r1", 3)
    give(house, "short", 5, days=3)
    spend(house, "r2", 1)
    # The first three were spent before `short` was there; it counts as spent by them all the same.
    assert {"short": "1.00", "long": "10.00", "forever": "10.00"} == left(house)
    house.clock.advance(3 * 86_400)
    assert 1 == house.ledger.sweeper.expire()
    assert 0 == house.ledger.sweeper.expire()
    account = house.account()
    assert (20 * UNITS, 20 * UNITS) == (account.granted, account.balance)
    expired = entries_of(house.ledger.store)[-1]
    assert (Kind.EXPIRY, "short", -UNITS) == (expired.kind, expired.request_id, expired.amount)
    house.clock.advance(30 * 86_400)
    house.ledger.sweeper.expire()
    assert {"forever": "10.00"} == left(house)


def test_the_sweeper_ends_grants_and_waits_while_the_clock_is_wrong(house):
    give(house, "short", 2, days=1)
    house.clock.advance(86_400)
    watch = house.ledger._watch
    watch.compare(house.clock() - 3600 * NS)  # as after a jump
    house.ledger._is_timed = False
    house.ledger._tick()
    assert {"short": "2.00"} == left(house)
    watch.compare(house.clock())
    house.ledger._tick()
    assert {} == left(house)


def test_a_grant_is_made_once_and_cannot_be_put_right_after_its_end(house):
    assert give(house, "g", 2, days=1) == give(house, "g", 2, days=1)
    with pytest.raises(errors.AlreadyExists, match="another expiry"):
        give(house, "g", 2, days=2)
    house.ledger.post(Adjust("acme", "g", "a", UNITS, "eve", "")).result()
    assert {"g": "1.00"} == left(house)
    house.clock.advance(86_400)
    house.ledger.sweeper.expire()
    with pytest.raises(errors.InvalidAmount, match="has expired"):
        house.ledger.post(Adjust("acme", "g", "b", 9 * UNITS, "eve", "")).result()


def test_rebuild_finds_what_expires_from_the_entries(house):
    give(house, "g", 2, days=1)
    with house.ledger.store.writing() as connection:
        connection.exec_driver_sql("DELETE FROM expiring")
    (problem,) = audit.verify(house.ledger.store).problems
    assert "expiring acme/1" == problem.tenant
    assert audit.rebuild(house.ledger.store).ok


@pytest.mark.parametrize("text", ["soon", "2024-12-31", "2300-01-01", "d", "-3d", "999999d"])
def test_an_invalid_day_is_explained(text):
    with pytest.raises(errors.InvalidSpan):
        end_of(text, START_NS)


def test_the_last_day_is_spent_to_its_end():
    assert START_NS + DAY_NS == end_of("2025-01-01", START_NS) == end_of("0d", START_NS)
    assert START_NS + 91 * DAY_NS == end_of("90d", START_NS + 5)


BY = {"by": "ops", "reason": "as agreed"}


def test_what_is_neither_spent_nor_held_can_be_paid_out(house):
    house.fund(UNITS)
    house.deposit(Kind.GRANT, UNITS, "g")
    house.reserve("r1", UNITS + 10)  # beyond what was granted
    with pytest.raises(errors.InsufficientBalance, match="available to tenant 'acme'"):
        house.deposit(Kind.WITHDRAWAL, UNITS - 9, "w")
    house.deposit(Kind.WITHDRAWAL, UNITS - 10, "w")
    account = house.account()
    assert (account.granted, account.topup, account.owed) == (UNITS, 10, 0)
    assert entries_of(house.ledger.store)[-1].kind is Kind.WITHDRAWAL


@pytest.mark.parametrize("kind", [Kind.TOPUP, Kind.WITHDRAWAL])
def test_money_is_booked_once_for_its_reference(house, kind):
    house.fund(UNITS)
    assert house.deposit(kind, 5, "w") == house.deposit(kind, 5, "w")
    with pytest.raises(errors.AlreadyExists):
        house.deposit(kind, 6, "w")
    assert house.account().topup - UNITS == (5 if kind is Kind.TOPUP else -5)


def test_what_was_spent_of_a_payment_that_is_taken_back_is_owed(house):
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
def test_a_mistyped_deposit_is_put_right(house, kind):
    house.deposit(kind, 1000 * UNITS, "p1")
    house.charge("r1", USAGE)
    assert adjust(house, 100 * UNITS, "a1") == adjust(house, 100 * UNITS, "a1")
    assert house.account().balance == 100 * UNITS - PRICE
    adjust(house, 0, "a2")
    assert house.account().owed == PRICE
    adjust(house, UNITS, "a3")
    assert house.account().balance == UNITS - PRICE


def test_an_adjustment_needs_a_deposit_and_a_difference(house):
    house.fund(UNITS)
    said = "no top-up and no grant with reference 'other'"
    with pytest.raises(errors.UnknownDeposit, match=said):
        adjust(house, 1, "a", "other")
    with pytest.raises(errors.InvalidAmount, match=r"already 1\.00 CNY"):
        adjust(house, UNITS, "a", "fund-0")


def test_nobody_books_money_under_the_servers_own_name(house):
    house.fund(UNITS)
    house.charge("r1", USAGE)
    as_system = {"by": SYSTEM, "reason": "x"}
    for booked in (
        house.ledger.post(Deposit("acme", Kind.TOPUP, amount=1, reference="d", **as_system)),
        house.ledger.post(Adjust("acme", "fund-0", amount=1, reference="a", **as_system)),
        house.ledger.correct("acme", "r1", reference="c", **as_system),
    ):
        with pytest.raises(errors.InvalidName, match="say who decides"):
            booked.result()


@pytest.mark.parametrize("prefix", ["", "cmpl-", "chatcmpl-", "resp_", "msg_"])
def test_a_request_is_found_by_the_id_of_its_answer(house, prefix):
    house.fund(UNITS)
    house.charge("r1", USAGE)
    given = house.ledger.correct("acme", f"{prefix}r1", reference="c1", amount=5, **BY).result()
    assert (given.amount, given.details["corrects"]) == (5, 2)
