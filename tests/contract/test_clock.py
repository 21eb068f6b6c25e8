"""A clock that jumps moves no bill to another month, and stops what would be dated wrongly."""

from pathlib import Path

import pytest

from billing.accounts import Accounts
from billing.clock import TOLERANCE_NS, ClockWatch
from billing.errors import ClockJumped
from billing.gate.commands import Deposit
from billing.gate.entries import Kind
from billing.gate.outcomes import Outcome
from billing.ledger import Ledger
from billing.money import UNITS
from billing.prices.book import NS
from billing.prices.cards import default_card
from billing.proof import audit
from billing.reports import usage as usage_report
from billing.reports.statement import statement
from billing.store.opening import database_url, open_store
from billing.usage import Usage
from tests.support.billing import START_NS, ManualClock, TestLedger

USAGE = Usage(miss=100, output=7)
DAY_S = 86_400


def test_one_charge_of_a_clock_that_was_ahead_leaves_the_others_in_their_month(
    house: TestLedger,
) -> None:
    house.fund(UNITS)
    house.charge("r1", USAGE)
    house.clock.advance(40 * DAY_S)
    house.charge("ahead", USAGE)
    house.clock.advance(-40 * DAY_S)
    for number in range(5):
        house.clock.advance(1)
        house.charge(f"later-{number}", USAGE, session="s")
    house.fund(UNITS)
    store = house.ledger.store
    january, february = (statement(store, "acme", f"2025-0{month}") for month in (1, 2))
    assert (january.requests, february.requests) == (6, 1)
    assert [movement.amount for movement in january.movements] == [UNITS, UNITS]
    months = usage_report.report(store, usage_report.Query(), usage_report.Unit.MONTH)
    assert [(p.period, p.requests) for p in months] == [("2025-01", 6), ("2025-02", 1)]
    in_shanghai = usage_report.parse_query(zone="Asia/Shanghai")
    days = usage_report.report(store, in_shanghai, usage_report.Unit.DAY)
    assert [(p.period, p.requests) for p in days] == [("2025-01-01", 6), ("2025-02-10", 1)]


def test_what_a_clock_that_was_ahead_ended_can_be_granted_again(house: TestLedger) -> None:
    """A server that starts under such a clock cannot know, so an operator must get back."""
    store, end_ns = house.ledger.store, START_NS + 30 * DAY_S * NS

    def grant(reference: str) -> None:
        given = house.ledger.post(
            Deposit(
                "acme", Kind.GRANT, amount=UNITS, reference=reference, by="eve", expires_ns=end_ns
            )
        )
        given.result()

    grant("gift")
    house.clock.advance(40 * DAY_S)
    assert 1 == house.ledger.expire()
    house.clock.advance(-40 * DAY_S)
    grant("gift again")
    assert 0 == house.ledger.expire()
    [movement] = statement(store, "acme", "2025-02").movements
    assert ("expiry", "gift", -UNITS) == (movement.kind, movement.reference, movement.amount)
    house.charge("r1", Usage(miss=500_000))
    assert UNITS // 2 == house.account().granted
    house.clock.advance(30 * DAY_S)
    assert 1 == house.ledger.expire()
    assert 0 == house.account().granted
    assert audit.verify(store).problems == []


@pytest.mark.parametrize("days_behind", [0, 1])
def test_a_start_says_that_the_ledger_is_of_a_later_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days_behind: int
) -> None:
    clock = ManualClock()
    for _ in range(2):
        store = open_store(database_url(tmp_path))
        accounts = Accounts(store, clock_ns=clock)
        ledger = Ledger(store, accounts, clock_ns=clock, timer_ns=ManualClock(0))
        ledger.start()
        if not accounts.find_tenant("acme"):
            accounts.create_tenant("acme", "CNY", by="test")
        ledger.close()
        store.close()
        clock.advance(-days_behind * DAY_S)
    assert days_behind == sum("86,400 s behind that" in text for text in caplog.messages)


def test_a_request_is_billed_in_the_month_of_its_admission(house: TestLedger) -> None:
    house.fund(UNITS)
    house.clock.advance(31 * DAY_S - 1)
    hold = house.reserve("r1", 0)
    house.clock.advance(60)
    house.settle(hold, USAGE)
    months = usage_report.report(house.ledger.store, usage_report.Query(), usage_report.Unit.MONTH)
    assert ["2025-01"] == [period.period for period in months]


def test_nothing_new_is_booked_while_the_clock_is_wrong(tmp_path: Path) -> None:
    clock, timer = ManualClock(), ManualClock(0)
    store = open_store(database_url(tmp_path))
    accounts = Accounts(store, clock_ns=clock)
    ledger = Ledger(store, accounts, clock_ns=clock, timer_ns=timer, first_card=default_card())
    ledger.start()
    try:
        accounts.create_tenant("acme", "CNY", by="test")
        ledger.post(Deposit("acme", Kind.TOPUP, amount=UNITS, reference="d1", by="test")).result()
        pinned = ledger.book.at("m", clock(), "CNY")
        running = ledger.reserve("acme", "running", 10**9, pinned).result()
        clock.advance(40 * DAY_S)
        with pytest.raises(ClockJumped, match="3,456,000 s ahead of where it should be"):
            ledger.reserve("acme", "r2", 1, pinned).result()
        with pytest.raises(ClockJumped):
            ledger.post(
                Deposit("acme", Kind.TOPUP, amount=UNITS, reference="d2", by="test")
            ).result()
        assert "ahead of where it should be" in ledger.refuses
        ledger.settle(running, USAGE, Outcome.FINISHED).result()
        clock.advance(-40 * DAY_S)
        assert "" == ledger.refuses
        ledger.reserve("acme", "r2", 1, pinned).result()
        assert statement(store, "acme", "2025-01").requests == 1
        assert audit.verify(store).problems == []
    finally:
        ledger.close()
        store.close()


def test_a_host_whose_clock_differs_from_the_databases_is_told() -> None:
    clock = ManualClock()
    watch = ClockWatch(clock, None)
    watch.compare(clock() - TOLERANCE_NS)
    watch.check()
    watch.compare(clock() + TOLERANCE_NS + NS)
    with pytest.raises(ClockJumped, match="121 s behind where it should be"):
        watch.check()
