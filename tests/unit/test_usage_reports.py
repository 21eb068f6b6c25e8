"""Usage over a span of days, in a zone, split by part; exact, and bounded whoever names users."""

import random
import time
from datetime import UTC, date, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.errors import InvalidName, UnknownTenant
from billing.gate.rollups import DAY_NS
from billing.money import parse_amount
from billing.prices.book import NS
from billing.prices.time_zones import LocalZone
from billing.reports import attribution
from billing.reports import usage as usage_reports
from billing.reports.attribution import NOBODY, OTHERS, HeavyParts
from billing.reports.statement import statement, statement_csv, statement_json
from billing.reports.usage import Query, Unit, midnight_ns, parse_query, report
from billing.store import reports as store_reports
from billing.store.opening import open_store
from billing.usage import Usage
from tests.support.billing import START_NS, ManualClock, running_ledger
from tests.support.commands import said
from tests.support.commands import told as told_by

HOUR = 3600
SPLITS = ("model", "project", "key", "session", "user", "tag:team")
FIRST = date(2025, 1, 1)
SHANGHAI = ZoneInfo("Asia/Shanghai")
# (hours after 2025-01-01T00:00Z, project, key)
CHARGES = [(1, "web", "k1"), (23, "web", "k2"), (25, "", "k1"), (24 * 40, "batch", "k1")]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A ledger with four requests of 100 tokens each, over two months."""
    path = tmp_path_factory.mktemp("data")
    clock = ManualClock()
    with running_ledger(f"sqlite:///{path / 'ledger.sqlite3'}", clock=clock) as house:
        house.fund(10**15)
        for number, (hours, project, key) in enumerate(CHARGES):
            clock.now_ns = START_NS + hours * HOUR * NS
            about = {"project": project, "key_id": key, "session": f"s{number % 2}"}
            house.charge(f"r{number}", Usage(hit_host=60, miss=40, output=5), **about)
    return path


@pytest.fixture
def store(data_dir):
    opened = open_store(f"sqlite:///{data_dir / 'ledger.sqlite3'}")
    yield opened
    opened.close()


def told(store, unit=Unit.DAY, **query):
    found = report(store, Query(**query), unit)
    return [(period.period, period.part, period.requests) for period in found]


def test_days_and_months_in_utc(store):
    assert [("2025-01-01", "", 2), ("2025-01-02", "", 1), ("2025-02-10", "", 1)] == told(store)
    assert [("2025-01", "", 3), ("2025-02", "", 1)] == told(store, Unit.MONTH)


@pytest.mark.parametrize("unit", Unit)
def test_rollups_and_entries_say_the_same(store, unit):
    """No charge lies in the minute by which the second zone is off: its days are cut, not other."""
    a_minute_off = timezone(timedelta(minutes=1))
    whole = report(store, Query(), unit)
    for split in (None, *SPLITS):
        expected = report(store, Query(split=split), unit)
        assert sum(p.amount for p in whole) == sum(p.amount for p in expected)
        assert sum(p.saved for p in whole) == sum(p.saved for p in expected)
        assert expected == report(store, Query(split=split, zone=a_minute_off), unit)
    there = (report(store, Query(split=split, zone=SHANGHAI), unit) for split in (None, "user"))
    told_in = [[(each.period, each.requests) for each in found] for found in there]
    assert told_in[0] == told_in[1]


def test_only_the_days_that_a_border_cuts_are_read_from_their_charges(store, monkeypatch):
    read = []
    real = store_reports.charges_between

    def noting(connection, tenant, from_ns, to_ns):
        read.append((from_ns // DAY_NS, (to_ns - 1) // DAY_NS))
        return real(connection, tenant, from_ns, to_ns)

    monkeypatch.setattr(store_reports, "charges_between", noting)
    told(store, Unit.MONTH)
    assert [] == read
    months = told(store, Unit.MONTH, zone=timezone(timedelta(hours=2)))
    assert [("2025-01", "", 3), ("2025-02", "", 1)] == months
    assert [] == read  # no charge lies in the days that the months' borders cut
    told(store, Unit.MONTH, zone=timezone(timedelta(hours=-2)))
    first = START_NS // DAY_NS
    assert [(first, first)] == read


def test_an_hour_of_a_pin_is_no_request_in_any_zone(tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.sqlite3'}"
    with running_ledger(url) as house:
        house.charge("r1", Usage(miss=40, output=5))
        house.charge("pin:doc:0:0", Usage(storage_token_hours=64))
        for zone in (UTC, ZoneInfo("Asia/Shanghai")):
            found = report(house.ledger.store, Query(zone=zone), Unit.DAY)
            assert [1] == [period.requests for period in found]
            assert 64 == found[0].tokens["storage_token_hours"]


def test_the_local_zone_knows_summer_and_winter(monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        berlin, local = ZoneInfo("Europe/Berlin"), LocalZone()
        for day in (date(2025, 1, 1), date(2025, 3, 30), date(2025, 7, 1), date(2025, 10, 26)):
            assert midnight_ns(day, berlin) == midnight_ns(day, local)
            noon = midnight_ns(day, berlin) // NS + 12 * HOUR
            zones = [datetime.fromtimestamp(noon, zone).isoformat() for zone in (berlin, local)]
            assert zones[0] == zones[1]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(("zone", "requests"), [(UTC, 1), (timezone(timedelta(hours=9)), 2)])
def test_a_span_has_both_its_ends(store, zone, requests):
    second = FIRST + timedelta(days=1)
    inside = told(store, since=second, until=second, zone=zone)
    assert [(second.isoformat(), "", requests)] == inside
    assert [] == told(store, since=date(2025, 3, 1), zone=zone)
    for endless in ("9" * 400 + "d", "999999d"):
        assert usage_reports.FIRST_DAY == parse_query(since=endless, zone=zone).since


def test_an_unknown_tenant_is_said(store):
    with pytest.raises(UnknownTenant, match="cachesvc tenants show"):
        report(store, Query(tenant="nobody"), Unit.DAY)
    with pytest.raises(UnknownTenant, match="cachesvc tenants show"):
        usage_reports.by_session(store, Query(tenant="nobody"))


def test_the_command_takes_spans_zones_and_splits(data_dir):
    flags = ("--since", "2025-01-01", "--until", "2025-01-31", "--timezone", "Asia/Shanghai")
    where = ("--data-dir", data_dir)
    days = told_by("usage", "--by", "day", *flags, *where)
    assert [("2025-01-01", 1), ("2025-01-02", 2)] == [(d["period"], d["requests"]) for d in days]
    months = ("usage", "--by", "month", *flags, "--breakdown", "key", *where)
    assert ["k1", "k2"] == [period["part"] for period in told_by(*months)]
    assert "k2" in said(*months)
    second = ("--since", "2025-01-02", "--until", "2025-01-02")
    sessions = told_by("usage", "--by", "session", *second, *where)  # by their last day
    assert ["s0"] == [each["period"] for each in sessions]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--since", "2025-13-01"), "write it like 2026-11-01, today"),
        (("--timezone", "Mars/Olympus"), "is not a time zone"),
        (("--since", "2025-02-01", "--until", "2025-01-01"), "is before the first"),
        (("--since", "1600-01-01"), "is not between 1970-01-01"),
        (("--until", "9999-12-31"), "is not between 1970-01-01"),
        (("--timezone", "Europe"), "is not a time zone"),
    ],
)
def test_a_span_that_is_none_is_said(data_dir, flags, words):
    assert words in said("usage", "--by", "day", *flags, "--data-dir", data_dir, code=2)


def parts(house, split):
    found = report(house.ledger.store, Query(split=split), Unit.ALL)
    return {period.part: period.requests for period in found}


def test_users_sessions_and_tags_partition_what_was_charged(house):
    asked = [
        {"user": "ann", "session": "s1", "tags": {"team": "x", "env": "prod"}},
        {"user": "ann", "session": "s2", "tags": {"team": "y"}},
        {"user": "bob", "session": "s1", "tags": {"env": "prod"}},
        {},
    ]
    for number, about in enumerate(asked):
        house.charge(f"r{number}", Usage(miss=100 * (number + 1)), **about)
    assert {"ann": 2, "bob": 1, NOBODY: 1} == parts(house, "user")
    assert {"s1": 2, "s2": 1, NOBODY: 1} == parts(house, "session")
    assert {"x": 1, "y": 1, NOBODY: 2} == parts(house, "tag:team")
    assert {"prod": 2, NOBODY: 2} == parts(house, "tag:env")
    made = statement(house.ledger.store, "acme", "2025-01", breakdown="user")
    assert made.exact == sum(part.amount for part in made.parts)
    said_by = statement_json(made)["parts"]
    assert {"ann": "0.0003", "bob": "0.0003", "-": "0.0004"} == {
        part["part"]: part["amount"] for part in said_by
    }
    rows = [line.split(",") for line in statement_csv(made).splitlines()]
    assert ("user", "amount") == (rows[0][4], rows[0][-1])
    assert made.exact == sum(parse_amount(row[-1]) for row in rows[1:])


@pytest.mark.parametrize("wrong", ["", "tag:", "users", "tag:" + "x" * 100, "tag:a\nb"])
def test_an_invalid_split_is_refused(wrong):
    with pytest.raises(InvalidName):
        parse_query(split=wrong)


def test_a_new_user_in_every_request_makes_no_longer_report(house, monkeypatch):
    monkeypatch.setattr(attribution, "LISTED", 5)
    monkeypatch.setattr(HeavyParts.dearest, "__defaults__", (5,))
    for number in range(60):
        house.charge(f"spam-{number}", Usage(miss=1), user=f"new-{number}")
    for number in range(4):
        house.charge(f"real-{number}", Usage(miss=1000), user=f"ann-{number % 2}")
    found = parts(house, "user")
    assert 6 == len(found)
    assert (2, 2) == (found["ann-0"], found["ann-1"])
    assert 64 == sum(found.values())
    by_day = report(house.ledger.store, Query(split="user"), Unit.DAY)
    assert 4060 == sum(period.tokens["miss"] for period in by_day)
    assert OTHERS in {period.part for period in by_day}


@given(st.integers(0, 10**6), st.integers(2, 20))
def test_who_costs_more_than_a_share_is_always_among_those_listed(seed, most):
    dice = random.Random(seed)
    heavy, costs = HeavyParts(most), dict[str, int]()
    for number in range(500):
        part = f"u{number}" if dice.random() < 0.7 else f"big{dice.randrange(3)}"
        cost = dice.randrange(1, 100)
        heavy.add(part, cost)
        costs[part] = costs.get(part, 0) + cost + 1
    assert len(heavy.dearest(10**6)) < 2 * most
    whole = sum(costs.values())
    assert {p for p, cost in costs.items() if cost * most > whole} <= heavy.dearest(10**6)


def test_the_command_sums_by_user_and_tag(house, tmp_path):
    house.charge("r1", Usage(miss=100), user="ann", tags={"team": "x"})

    where, since = ("--data-dir", tmp_path), ("--since", "2025-01-01")
    (by_user,) = told_by("usage", "--by", "user", *where)
    assert ("ann", "all", 1) == tuple(by_user[name] for name in ("part", "period", "requests"))
    assert "ann" in said("usage", "--by", "user", *where)
    (by_tag,) = told_by("usage", "--by", "day", "--breakdown", "tag:team", *since, *where)
    assert ("x", "2025-01-01") == (by_tag["part"], by_tag["period"])
    assert "tag:NAME" in said("usage", "--by", "colour", *where, code=2)
    of_acme = ("--statement", "2025-01", "--tenant", "acme", "--by", "tag:team")
    made = told_by("usage", *of_acme, *where)
    assert ["x"] == [part["part"] for part in made["parts"]]
