"""Statements: every column adds up to the last unit, in any zone and currency; printed safely."""

import csv
import io
from datetime import UTC
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from billing.errors import InvalidSpan
from billing.money import UNITS, parse_amount
from billing.prices.book import NS
from billing.prices.cards import find_card, parse_card
from billing.reports.statement import statement, statement_csv, statement_json
from billing.usage import Usage
from tests.support.billing import START_NS, running_ledger

HOUR_NS = 3600 * NS
SHANGHAI = ZoneInfo("Asia/Shanghai")
EVIL = '=HYPERLINK("http://e.vil","<b>x</b>")'


@pytest.fixture
def house(tmp_path):
    """Charges around the beginning of February 2025, in UTC and in Shanghai."""
    with running_ledger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}") as house:
        house.fund(UNITS)
        for number, hours in enumerate((1, 31 * 24 - 9, 31 * 24 - 7, 31 * 24 + 1, 58 * 24)):
            house.clock.now_ns = START_NS + hours * HOUR_NS
            house.charge(f"r{number}", Usage(hit_disk=640 * number, miss=33_335, output=77))
        house.charge("pin:doc:0:0", Usage(storage_token_hours=640))
        give_back = house.ledger.correct(
            "acme", "r3", reference="c1", by="eve", reason=EVIL, amount=7_000_001
        )
        give_back.result()
        yield house


def of(house, month="2025-02", zone=UTC, tenant="acme"):
    return statement(house.ledger.store, tenant, month, zone)


@pytest.mark.parametrize("zone", [UTC, SHANGHAI])
def test_every_column_adds_up(house, zone):
    found = of(house, zone=zone)
    assert found.exact == sum(line.amount for line in found.lines)
    printed = found.rounded + found.residue - found.corrected + found.rounding
    assert printed == found.total
    assert abs(found.rounding) <= 10 ** (12 - found.places) // 2
    assert found.corrected == 7_000_001
    rows = list(csv.DictReader(io.StringIO(statement_csv(found))))
    total = parse_amount(statement_json(found)["total"])
    assert total == sum(parse_amount(row["rounded"]) for row in rows)
    exact = sum(parse_amount(row["amount"]) for row in rows if row["amount"])
    assert exact == found.exact - found.corrected


@pytest.mark.parametrize("zone", [UTC, SHANGHAI, ZoneInfo("America/New_York")])
def test_a_month_ends_where_the_next_begins(house, zone):
    months = [of(house, f"2025-{number:02}", zone) for number in range(1, 5)]
    for before, after in pairwise(months):
        assert before.closing == after.opening
        assert before.is_over and before.closing - before.opening == -before.exact + sum(
            movement.amount for movement in before.movements
        )
    assert 0 == of(house, "2024-12", zone).opening
    assert not statement_json(of(house, "2261-12", zone))["is_over"]
    assert house.account().balance == months[-1].closing


@pytest.mark.parametrize("month", ["May", "2025-13", "2025-00", "1969-12", "2262-01", ""])
def test_a_month_that_is_none_is_said(house, month):
    with pytest.raises(InvalidSpan):
        of(house, month)


def test_names_and_reasons_of_others_are_text(house):
    card = find_card("two-tier").text.replace('"two-tier"', "'=1+1'").replace("USD", "CNY")
    house.accounts.apply_card(parse_card(card), by="eve")
    house.charge("r9", Usage(miss=1))
    cells = {cell for row in csv.reader(io.StringIO(statement_csv(of(house)))) for cell in row}
    assert "'=1+1 1" in cells
    assert not [cell for cell in cells if cell.startswith(("=", "+", "@"))]


@pytest.mark.parametrize(
    ("currency", "printed"),
    [("JPY", "12"), ("KWD", "12.346"), ("CLF", "12.3457"), ("EUR", "12.35")],
)
def test_amounts_have_the_places_of_their_currency(house, currency, printed):
    card = f"""[card]\nname="{currency}"\nversion="1"\nvalid_from=2020-01-01T00:00:00Z
currency="{currency}"\n[[model]]\nmatch="*"\nhit=1\nmiss=12345678.9\noutput=1\n"""
    house.accounts.apply_card(parse_card(card), by="eve")
    house.accounts.create_tenant("bolt", currency, credit_limit=None, by="eve")
    pinned = house.ledger.book.at("model", house.clock(), currency)
    hold = house.ledger.reserve("bolt", "r1", 0, pinned).result()
    house.settle(hold, Usage(miss=1), "finished")  # type: ignore[arg-type]
    assert printed == statement_json(of(house, tenant="bolt"))["total"]


def test_an_statement_beyond_64_bits_is_exact_and_readable(house):
    house.charge("whale", Usage(miss=10**13 + 1))
    found = of(house)
    misses = [line.amount for line in found.lines if line.name == "miss"]
    assert [2 * 33_335 * 10**6 + 10**19 + 10**6] == misses
    assert "10000000.07" == statement_json(found)["total"]
