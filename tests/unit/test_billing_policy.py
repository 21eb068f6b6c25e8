"""Each line of the written policy in docs/billing.md, in its order."""

import re
from pathlib import Path

import pytest

from billing.errors import InsufficientBalance
from billing.gate.commands import Reap
from billing.gate.entries import Kind
from billing.gate.outcomes import Outcome, billable
from billing.money import UNITS
from billing.prices.book import NS
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


@pytest.mark.parametrize("outcome", Outcome)
def test_every_way_out_is_billed_as_its_line_says_and_ends_the_hold(house, outcome):
    """After the first token and before it; what was not billed is on the record."""
    for name, used, billed in zip("ab", (WHOLE, PROMPT_ONLY), LINES[outcome], strict=True):
        assert billable(used, outcome) == billed
        hold = house.reserve(name, 10**10)
        settled = house.settle(hold, used, outcome)
        details = settled.entry.details
        assert (settled.usage, details["outcome"]) == (billed, outcome)
        assert details.get("unbilled") == (None if billed == used else used.record())
        assert house.account().held == 0
        assert house.settle(hold, used, outcome).repeated


def test_a_failure_that_sent_nothing_costs_nothing(house):
    """Such as an answer that goes out whole: its tokens were made, and the client got a 500."""
    hold = house.reserve("r1", 10**10)
    entry = house.settle(hold, WHOLE, Outcome.FAILED, delivered=False).entry
    assert (entry.amount, entry.details["unbilled"]) == (0, WHOLE.record())


def test_the_docs_have_a_line_for_every_outcome():
    text = Path("docs/billing.md").read_text()
    text = text.partition("## Every way out")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert documented == {outcome.value for outcome in Outcome}


def test_a_correction_gives_back_paid_money_first_and_granted_money_last(house):
    house.deposit(Kind.GRANT, 5_000_000, "g")
    house.charge("r1", Usage(output=4))  # 5 granted, 3 paid
    for reference, amount, granted, owing in (
        ("a", 2_000_000, 0, 1_000_000),
        ("b", 2_000_000, 1_000_000, 0),
        ("c", 4_000_000, 5_000_000, 0),
    ):
        house.correct("r1", reference, amount)
        account = house.account()
        assert (account.granted, account.topup) == (granted, UNITS - owing)


def test_what_is_given_back_settles_what_is_owed_first(house):
    house.accounts.set_credit_limit("acme", UNITS, by="test")
    house.charge("r1", Usage(output=500_000))  # all that was paid
    house.charge("r2", Usage(output=2))
    assert house.account().owed == 4_000_000
    correct = house.ledger.correct("acme", "r1", reference="c", by="ops", reason="", amount=10**7)
    correct.result()
    account = house.account()
    assert (account.owed, account.topup) == (0, 6_000_000)
    house.correct("r2", "d")  # which was owed: paid money all the same
    assert house.account().topup == 10_000_000


def test_a_postpaid_tenant_owes_up_to_its_limit_and_no_more(house):
    house.accounts.set_credit_limit("acme", 10**7, by="test")
    hold = house.reserve("r1", UNITS + 10**7)
    with pytest.raises(InsufficientBalance):
        house.reserve("r2", 1)
    house.settle(hold, Usage(output=500_005))
    account = house.account()
    assert (account.owed, account.available) == (10**7, 0)
    with pytest.raises(InsufficientBalance):
        house.reserve("r3", 1)


def test_a_hold_that_its_server_renewed_is_not_ended_by_another(house):
    hold = house.reserve("r1", 10)
    expired_at_ns = house.clock() + 60 * NS  # as the other read it
    house.clock.advance(50)
    house.ledger.top_up(hold, 1).result()
    reap = Reap("acme", "r1", Outcome.LAPSED, expired_at_ns)
    results, _ = house.ledger.store.apply([reap], house.ledger.book, house.clock)
    assert results == [None]
    assert house.account().held == 11
