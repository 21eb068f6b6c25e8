"""Grants that expire: what is spent first, what is taken back, and that nobody can pretend it."""

import pytest

from billing.errors import AlreadyExists, InvalidAmount, InvalidSpan
from billing.gate.commands import Adjust
from billing.gate.entries import Entry, Kind
from billing.money import UNITS
from billing.prices.book import NS
from billing.proof import audit
from billing.reports.standing import end_of, grant_documents
from billing.usage import Usage
from tests.contract.conftest import entries
from tests.support.billing import START_NS, TestLedger

DAY_NS = 86_400 * NS


def give(house: TestLedger, name: str, amount: int, days: int = 0) -> Entry:
    expires_ns = START_NS + days * DAY_NS if days else 0
    return house.deposit(Kind.GRANT, amount * UNITS, name, expires_ns=expires_ns)


def spend(house: TestLedger, name: str, amount: int) -> None:
    house.charge(name, Usage(miss=amount * 1_000_000))  # 1 CNY each


def left(house: TestLedger) -> dict[str, str]:
    return {each["reference"]: each["left"] for each in grant_documents(house.ledger.store, "acme")}


def test_what_expires_first_is_spent_first_whichever_came_first(house: TestLedger) -> None:
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
    expired = entries(house.ledger.store)[-1]
    assert (Kind.EXPIRY, "short", -UNITS) == (expired.kind, expired.request_id, expired.amount)
    house.clock.advance(30 * 86_400)
    house.ledger.sweeper.expire()
    assert {"forever": "10.00"} == left(house)


def test_a_grant_that_was_spent_ends_with_nothing_taken(house: TestLedger) -> None:
    give(house, "short", 2, days=1)
    house.fund(5 * UNITS)
    spend(house, "r1", 3)
    house.clock.advance(86_400)
    assert 1 == house.ledger.sweeper.expire()
    assert 4 * UNITS == house.account().balance
    assert 0 == entries(house.ledger.store)[-1].amount


def test_the_sweeper_ends_grants_and_waits_while_the_clock_is_wrong(house: TestLedger) -> None:
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


def test_a_request_and_a_correction_after_the_end_of_their_grant(house: TestLedger) -> None:
    """One that runs ends in debt. What is given back stays."""
    give(house, "short", 2, days=1)
    hold = house.reserve("r1", 2 * UNITS, ttl_s=10**6)
    house.clock.advance(86_400)
    house.ledger.sweeper.expire()
    house.settle(hold, Usage(miss=2_000_000))
    assert -2 * UNITS == house.account().balance
    house.fund(2 * UNITS)
    give(house, "next", 2, days=3)
    spend(house, "r2", 2)
    house.clock.advance(3 * 86_400)
    house.ledger.sweeper.expire()
    house.correct("r2", "c")
    assert 2 * UNITS == house.account().granted


def test_a_grant_is_made_once_and_cannot_be_put_right_after_its_end(house: TestLedger) -> None:
    assert give(house, "g", 2, days=1) == give(house, "g", 2, days=1)
    with pytest.raises(AlreadyExists, match="another expiry"):
        give(house, "g", 2, days=2)
    house.ledger.post(Adjust("acme", "g", "a", UNITS, "eve", "")).result()
    assert {"g": "1.00"} == left(house)
    house.clock.advance(86_400)
    house.ledger.sweeper.expire()
    with pytest.raises(InvalidAmount, match="has expired"):
        house.ledger.post(Adjust("acme", "g", "b", 9 * UNITS, "eve", "")).result()


def test_rebuild_finds_what_expires_from_the_entries(house: TestLedger) -> None:
    give(house, "g", 2, days=1)
    with house.ledger.store.writing() as connection:
        connection.exec_driver_sql("DELETE FROM expiring")
    (problem,) = audit.verify(house.ledger.store).problems
    assert "expiring acme/1" == problem.tenant
    assert audit.rebuild(house.ledger.store).ok


@pytest.mark.parametrize("text", ["soon", "2024-12-31", "2300-01-01", "d", "-3d", "999999d"])
def test_an_invalid_day_is_explained(text: str) -> None:
    with pytest.raises(InvalidSpan):
        end_of(text, START_NS)


def test_the_last_day_is_spent_to_its_end() -> None:
    assert START_NS + DAY_NS == end_of("2025-01-01", START_NS) == end_of("0d", START_NS)
    assert START_NS + 91 * DAY_NS == end_of("90d", START_NS + 5)
