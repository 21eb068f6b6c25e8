"""A clock that jumps moves no bill to another month, and stops what would be dated wrongly."""

import pytest

from billing.clock import TOLERANCE_NS, ClockWatch
from billing.errors import ClockJumped
from billing.gate.entries import Kind
from billing.money import UNITS
from billing.prices.book import NS
from billing.proof import audit
from billing.reports import usage as usage_report
from billing.reports.statement import statement
from billing.store.opening import database_url
from billing.usage import Usage
from tests.support.billing import START_NS, ManualClock, running_ledger

USAGE = Usage(miss=100, output=7)
DAY_S = 86_400


def test_one_charge_of_a_clock_that_was_ahead_leaves_the_others_in_their_month(house):
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


def test_what_a_clock_that_was_ahead_ended_can_be_granted_again(house):
    """A server that starts under such a clock cannot know, so an operator must get back."""
    store, ends = house.ledger.store, {"expires_ns": START_NS + 30 * DAY_S * NS}
    house.deposit(Kind.GRANT, UNITS, "gift", **ends)
    house.clock.advance(40 * DAY_S)
    assert 1 == house.ledger.sweeper.expire()
    house.clock.advance(-40 * DAY_S)
    house.deposit(Kind.GRANT, UNITS, "gift again", **ends)
    assert 0 == house.ledger.sweeper.expire()
    [movement] = statement(store, "acme", "2025-02").movements
    assert ("expiry", "gift", -UNITS) == (movement.kind, movement.reference, movement.amount)
    house.charge("r1", Usage(miss=500_000))
    assert UNITS // 2 == house.account().granted
    house.clock.advance(30 * DAY_S)
    assert 1 == house.ledger.sweeper.expire()
    assert 0 == house.account().granted


@pytest.mark.parametrize("days_behind", [0, 1])
def test_a_start_says_that_the_ledger_is_of_a_later_day(tmp_path, caplog, days_behind):
    clock = ManualClock()
    for _ in range(2):
        with running_ledger(database_url(tmp_path), clock=clock, timer_ns=ManualClock(0)):
            clock.advance(-days_behind * DAY_S)
    assert days_behind == sum("86,400 s behind that" in text for text in caplog.messages)


def test_a_request_is_billed_in_the_month_of_its_admission(house):
    house.fund(UNITS)
    house.clock.advance(31 * DAY_S - 1)
    hold = house.reserve("r1", 0)
    house.clock.advance(60)
    house.settle(hold, USAGE)
    months = usage_report.report(house.ledger.store, usage_report.Query(), usage_report.Unit.MONTH)
    assert ["2025-01"] == [period.period for period in months]


def test_nothing_new_is_booked_while_the_clock_is_wrong(tmp_path):
    with running_ledger(database_url(tmp_path), timer_ns=ManualClock(0)) as house:
        house.fund(UNITS)
        running = house.reserve("running", 10**9)
        house.clock.advance(40 * DAY_S)
        with pytest.raises(ClockJumped, match="3,456,000 s ahead of where it should be"):
            house.reserve("r2", 1)
        with pytest.raises(ClockJumped):
            house.fund(UNITS)
        assert "ahead of where it should be" in house.ledger.refuses
        house.settle(running, USAGE)
        house.clock.advance(-40 * DAY_S)
        assert "" == house.ledger.refuses
        house.reserve("r2", 1)
        assert statement(house.ledger.store, "acme", "2025-01").requests == 1
        assert audit.verify(house.ledger.store).problems == []


def test_a_host_whose_clock_differs_from_the_databases_is_told():
    clock = ManualClock()
    watch = ClockWatch(clock, None)
    watch.compare(clock() - TOLERANCE_NS)
    assert watch.jumped is None
    watch.compare(clock() + TOLERANCE_NS + NS)
    assert "121 s behind where it should be" in str(watch.jumped)
