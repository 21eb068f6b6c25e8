"""Usage by user, session and tag: exact, and bounded whoever names users."""

import json
import random
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from billing.errors import InvalidName
from billing.money import UNITS, parse_amount
from billing.reports import attribution
from billing.reports.attribution import NOBODY, OTHERS, HeavyParts
from billing.reports.statement import statement, statement_csv, statement_json
from billing.reports.usage import Query, Unit, parse_query, report
from billing.usage import Usage
from cachesvc.cli import app
from tests.support.billing import TestLedger, running_ledger

SPAN = {"since": date(2025, 1, 1), "until": date(2025, 1, 31)}


@pytest.fixture
def house(tmp_path: Path) -> Iterator[TestLedger]:
    with running_ledger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}") as house:
        house.fund(UNITS)
        yield house


def parts(house: TestLedger, split: str) -> dict[str, int]:
    found = report(house.ledger.store, Query(split=split), Unit.ALL)
    return {period.part: period.requests for period in found}


def test_users_sessions_and_tags_partition_what_was_charged(house: TestLedger) -> None:
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
    told = statement_json(made)["parts"]
    assert {"ann": "0.0003", "bob": "0.0003", "-": "0.0004"} == {
        part["part"]: part["amount"] for part in told
    }
    rows = [line.split(",") for line in statement_csv(made).splitlines()]
    assert ("user", "amount") == (rows[0][4], rows[0][-1])
    assert made.exact == sum(parse_amount(row[-1]) for row in rows[1:])


@pytest.mark.parametrize("wrong", ["", "tag:", "users", "tag:" + "x" * 100, "tag:a\nb"])
def test_an_invalid_split_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidName):
        parse_query(split=wrong)


def test_a_new_user_in_every_request_makes_no_longer_report(
    house: TestLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_who_costs_more_than_a_share_is_always_among_those_listed(seed: int, most: int) -> None:
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


def test_the_command_sums_by_user_and_tag(house: TestLedger, tmp_path: Path) -> None:
    house.charge("r1", Usage(miss=100), user="ann", tags={"team": "x"})

    def told(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["usage", *arguments, "--data-dir", str(tmp_path)])
        assert code == result.exit_code, result.output
        return result.output

    (by_user,) = json.loads(told("--by", "user", "--json"))
    assert ("ann", "all", 1) == tuple(by_user[name] for name in ("part", "period", "requests"))
    assert "ann" in told("--by", "user")
    (by_tag,) = json.loads(
        told("--by", "day", "--breakdown", "tag:team", "--since", "2025-01-01", "--json")
    )
    assert ("x", "2025-01-01") == (by_tag["part"], by_tag["period"])
    said = told("--by", "colour", code=2)
    assert "tag:NAME" in said.replace("\n", "")
    made = json.loads(told("--statement", "2025-01", "--tenant", "acme", "--by", "tag:team"))
    assert ["x"] == [part["part"] for part in made["parts"]]
