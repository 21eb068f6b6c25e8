"""Holds out of an advance: given at once, covered by the store, and never more than there is."""

from collections.abc import Callable, Iterator
from time import monotonic, sleep

import pytest

from billing.errors import InsufficientBalance, TenantSuspended
from billing.gate.commands import Allot, Deposit, Reserve
from billing.gate.entries import Kind
from billing.gate.holds import Hold, RequestContext
from billing.gate.outcomes import Outcome
from billing.ledger import Ledger
from billing.money import UNITS
from billing.proof import audit
from billing.store.opening import open_store
from billing.usage import EMPTY, Usage
from tests.support.billing import TestLedger, running_ledger

PRICE = 2_000_000  # of one output token


@pytest.fixture
def house(url: str) -> Iterator[TestLedger]:
    with running_ledger(url) as house:
        house.fund(UNITS)
        yield house


def soon(condition: Callable[[], bool]) -> None:
    """Waits for what a thread does in its own time."""
    until = monotonic() + 60
    while not condition():
        assert monotonic() < until
        sleep(0.005)


def ahead(house: TestLedger) -> int:
    return sum(advance.amount for advance in house.ledger.store.all_advances())


def busy(house: TestLedger) -> list[Hold]:
    """Holds, until the store has given an advance and the ledger knows of it."""
    holds: list[Hold] = []

    def is_given() -> bool:
        holds.extend(house.reserve(f"b{len(holds) + i}", PRICE) for i in range(16))
        future = reserve(house, f"probe{len(holds)}")
        given = future.done()  # before any thread could have answered
        holds.append(future.result())
        return given and ahead(house) > 0

    soon(is_given)
    return holds


def reserve(house: TestLedger, name: str, amount: int = PRICE):  # type: ignore[no-untyped-def]
    pinned = house.ledger.book.at("model", house.clock(), "CNY")
    return house.ledger.reserve("acme", name, amount, pinned, context=RequestContext())


def quiet(house: TestLedger) -> None:
    soon(lambda: not house.ledger.store.all_advances())


def test_a_busy_tenant_gets_its_holds_at_once_and_each_is_booked(house: TestLedger) -> None:
    holds = busy(house)
    for hold in holds:
        house.ledger.settle(hold, Usage(output=1), Outcome.FINISHED).result()
    assert audit.verify(house.ledger.store).problems == []
    quiet(house)  # the sweeper gives back what nobody draws on
    account = house.ledger.balance("acme")
    assert (account.held, account.balance) == (0, UNITS - len(holds) * PRICE)
    assert audit.verify(house.ledger.store).problems == []


def test_what_is_held_in_advance_cannot_be_spent_by_anybody_else(house: TestLedger) -> None:
    store, book = house.ledger.store, house.ledger.book
    allot = Allot("acme", "other", "run", UNITS // 8, 2**62)
    assert store.apply([allot], book, house.clock)[0] == [UNITS // 8]
    with pytest.raises(InsufficientBalance):
        house.reserve("r", UNITS - UNITS // 8 + 1)
    everything = {"reference": "w", "by": "test", "reason": "all"}
    with pytest.raises(InsufficientBalance):
        house.ledger.post(Deposit("acme", Kind.WITHDRAWAL, amount=UNITS, **everything)).result()
    house.reserve("r", UNITS - UNITS // 8)


def test_near_the_limit_every_hold_asks_the_account(house: TestLedger) -> None:
    store, book = house.ledger.store, house.ledger.book
    (more,), _ = store.apply([Allot("acme", "s", "b", UNITS // 8 + 1, 2**62)], book, house.clock)
    assert (0, 0) == (more, house.ledger.balance("acme").held)


def test_a_hold_drawn_on_a_missing_advance_asks_the_account(house: TestLedger) -> None:
    store, book = house.ledger.store, house.ledger.book
    hold = Hold("acme", "r", book.at("model", house.clock(), "CNY"))
    drawn = Reserve(hold, UNITS + 1, 2**62, "s", "b", drawn=True)
    (result,), _ = store.apply([drawn], book, house.clock)
    assert isinstance(result, InsufficientBalance)
    assert 0 == house.ledger.balance("acme").held


def test_all_that_is_given_at_once_is_covered(house: TestLedger) -> None:
    """Two servers, one balance, holds without waiting for any answer: none is beyond it."""
    other = Ledger(house.ledger.store, house.accounts, owner="two", clock_ns=house.clock)
    other.start()
    try:
        pinned = house.ledger.book.at("model", house.clock(), "CNY")
        asked = []
        for i in range(2_000):
            ledger = (house.ledger, other)[i % 2]
            asked.append(ledger.reserve("acme", f"r{i}", UNITS // 1500, pinned))
            if i % 50 == 49:
                asked[-1].exception()  # so that advances are given meanwhile
        given = [future.result() for future in asked if future.exception() is None]
        soon(lambda: len(given) == len(house.ledger.store.all_holds()))
        assert 0 <= house.ledger.balance("acme").available
        assert 1_200 < len(given) <= 1_500
    finally:
        other.close()
    assert audit.verify(house.ledger.store).problems == []


def test_a_suspended_tenant_draws_no_more(house: TestLedger) -> None:
    busy(house)
    house.accounts.set_suspended("acme", True, by="test")
    with pytest.raises(TenantSuspended):
        reserve(house, "after").result()
    quiet(house)


def test_what_a_dead_server_held_is_given_back(url: str) -> None:
    with running_ledger(url) as house:
        house.fund(UNITS)
        dead = [Allot("acme", name, "run", 5, house.clock() + 60) for name in ("server", "gone")]
        house.ledger.store.apply(dead, house.ledger.book, house.clock)
        assert 10 == ahead(house)
        house.ledger.sweep()
        assert 10 == ahead(house)
    with running_ledger(url) as house:  # its own name: at once; the other's when its lease is over
        assert 5 == ahead(house)
        house.clock.advance(1)
        house.ledger.sweep()
        assert (0, 0) == (ahead(house), house.ledger.balance("acme").held)


def test_closing_gives_back_what_was_held(url: str) -> None:
    with running_ledger(url) as house:
        house.fund(UNITS)
        for hold in busy(house):
            house.ledger.settle(hold, EMPTY, Outcome.FAILED).result()
    store = open_store(url)
    assert [] == store.all_advances()
    assert audit.verify(store).problems == []
    store.close()
