"""Each line of the written policy in docs/billing.md, in its order."""

import re
from pathlib import Path

import pytest

from billing import audit
from billing.errors import InsufficientBalance
from billing.money import UNITS
from billing.policy import Outcome, billable
from billing.testing import TestLedger, running_ledger
from billing.usage import EMPTY, Usage

WHOLE = Usage(hit_disk=900, miss=100, output=7)
PROMPT_ONLY = Usage(hit_disk=900, miss=100)
LINES = {
    Outcome.FINISHED: (WHOLE, PROMPT_ONLY),
    Outcome.BUDGET: (WHOLE, PROMPT_ONLY),
    Outcome.CLIENT_GONE: (WHOLE, PROMPT_ONLY),
    Outcome.FAILED: (WHOLE, EMPTY),
    Outcome.CRASHED: (WHOLE, EMPTY),
    Outcome.LAPSED: (WHOLE, EMPTY),
}


@pytest.fixture
def house(tmp_path: Path):  # type: ignore[no-untyped-def]
    with running_ledger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}") as house:
        house.fund(UNITS)
        yield house
        assert audit.verify(house.ledger.store).problems == []


@pytest.mark.parametrize("outcome", Outcome)
def test_what_is_billed_after_and_before_the_first_token(outcome: Outcome) -> None:
    after, before = LINES[outcome]
    assert billable(WHOLE, outcome) == after
    assert billable(PROMPT_ONLY, outcome) == before


def test_a_failure_that_sent_nothing_costs_nothing(house: TestLedger) -> None:
    """Such as an answer that goes out whole: its tokens were made, and the client got a 500."""
    hold = house.reserve("r1", 10**10)
    entry = house.ledger.settle(hold, WHOLE, Outcome.FAILED, delivered=False).result().entry
    assert (entry.amount, entry.details["unbilled"]) == (0, WHOLE.record())


def test_the_docs_have_a_line_for_every_outcome() -> None:
    text = Path("docs/billing.md").read_text()
    text = text.partition("## Every way out")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert documented == {outcome.value for outcome in Outcome}


@pytest.mark.parametrize("outcome", Outcome)
def test_every_way_out_ends_the_hold_and_leaves_one_charge(
    house: TestLedger, outcome: Outcome
) -> None:
    hold = house.reserve("r1", 10**10)
    settled = house.ledger.settle(hold, WHOLE, outcome).result()
    assert house.ledger.balance("acme").held == 0
    assert settled.entry.details["outcome"] == outcome
    assert house.ledger.settle(hold, WHOLE, outcome).result().repeated


def test_a_refused_request_leaves_nothing(house: TestLedger) -> None:
    with pytest.raises(InsufficientBalance):
        house.reserve("r1", 2 * UNITS)
    account = house.ledger.balance("acme")
    assert (account.held, account.seq) == (0, 1)


def test_what_was_not_billed_is_on_the_record(house: TestLedger) -> None:
    hold = house.reserve("r1", 10**10)
    entry = house.ledger.settle(hold, PROMPT_ONLY, Outcome.FAILED).result().entry
    assert (entry.amount, entry.details["unbilled"]) == (0, PROMPT_ONLY.record())


def test_an_overdraft_is_at_most_what_was_made_beyond_the_hold(house: TestLedger) -> None:
    hold = house.reserve("r1", UNITS)
    beyond = Usage(output=500_001)  # the hold covers 500,000
    house.ledger.settle(hold, beyond, Outcome.FINISHED).result()
    account = house.ledger.balance("acme")
    assert (account.topup, account.owed) == (0, 2_000_000)


def test_the_price_is_that_of_the_admission(house: TestLedger) -> None:
    from billing.cards import parse_card

    hold = house.reserve("r1", 10**10)
    dearer = house.ledger.book.cards[0].text.replace('"2024-08-02"', '"2025"')
    dearer = dearer.replace("2024-08-02T", "2025-01-01T").replace('output = "2"', 'output = "9"')
    house.accounts.apply_card(parse_card(dearer), by="test")
    assert house.ledger.book.at("m", house.clock(), "CNY").rates.output == 9_000_000
    settled = house.ledger.settle(hold, Usage(output=1), Outcome.FINISHED).result()
    assert settled.charge.amount == 2_000_000
    assert settled.entry.details["version"] == "2024-08-02"
