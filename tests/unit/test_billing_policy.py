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
from billing.proof import audit
from billing.store import reports as store_reports
from billing.usage import EMPTY, Usage
from tests.support.billing import TestLedger, running_ledger

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
    entry = house.settle(hold, WHOLE, Outcome.FAILED, delivered=False).entry
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
    settled = house.settle(hold, WHOLE, outcome)
    assert house.account().held == 0
    assert settled.entry.details["outcome"] == outcome
    assert house.settle(hold, WHOLE, outcome).repeated


def test_a_refused_request_leaves_nothing(house: TestLedger) -> None:
    with pytest.raises(InsufficientBalance):
        house.reserve("r1", 2 * UNITS)
    account = house.account()
    assert (account.held, account.seq) == (0, 1)


def test_what_was_not_billed_is_on_the_record(house: TestLedger) -> None:
    hold = house.reserve("r1", 10**10)
    entry = house.settle(hold, PROMPT_ONLY, Outcome.FAILED).entry
    assert (entry.amount, entry.details["unbilled"]) == (0, PROMPT_ONLY.record())


def test_an_overdraft_is_at_most_what_was_made_beyond_the_hold(house: TestLedger) -> None:
    hold = house.reserve("r1", UNITS)
    beyond = Usage(output=500_001)  # the hold covers 500,000
    house.settle(hold, beyond)
    account = house.account()
    assert (account.topup, account.owed) == (0, 2_000_000)


def test_the_price_is_that_of_the_admission(house: TestLedger) -> None:
    from billing.prices.cards import parse_card

    hold = house.reserve("r1", 10**10)
    dearer = house.ledger.book.cards[0].text.replace('"2024-08-02"', '"2025"')
    dearer = dearer.replace("2024-08-02T", "2025-01-01T").replace('output = "2"', 'output = "9"')
    house.accounts.apply_card(parse_card(dearer), by="test")
    assert house.ledger.book.at("m", house.clock(), "CNY").rates.output == 9_000_000
    settled = house.settle(hold, Usage(output=1))
    assert settled.charge.amount == 2_000_000
    assert settled.entry.details["version"] == "2024-08-02"


def test_granted_money_is_spent_before_paid_money(house: TestLedger) -> None:
    house.deposit(Kind.GRANT, 5_000_000, "g")
    house.charge("r1", Usage(output=1))
    account = house.account()
    assert (account.granted, account.topup) == (3_000_000, UNITS)
    house.charge("r2", Usage(output=2))
    account = house.account()
    assert (account.granted, account.topup) == (0, UNITS - 1_000_000)


def test_a_correction_gives_back_paid_money_first_and_granted_money_last(house: TestLedger) -> None:
    house.deposit(Kind.GRANT, 5_000_000, "g")
    house.charge("r1", Usage(output=4))  # 5 granted, 3 paid

    def give_back(reference: str, amount: int) -> tuple[int, int]:
        asked = house.ledger.correct(
            "acme", "r1", reference=reference, by="ops", reason="", amount=amount
        )
        asked.result()
        account = house.account()
        return account.granted, account.topup

    assert give_back("a", 2_000_000) == (0, UNITS - 1_000_000)
    assert give_back("b", 2_000_000) == (1_000_000, UNITS)
    assert give_back("c", 4_000_000) == (5_000_000, UNITS)


def test_what_is_given_back_settles_what_is_owed_first(house: TestLedger) -> None:
    house.accounts.set_credit_limit("acme", UNITS, by="test")
    house.charge("r1", Usage(output=500_000))  # all that was paid
    house.charge("r2", Usage(output=2))
    assert house.account().owed == 4_000_000
    correct = house.ledger.correct("acme", "r1", reference="c", by="ops", reason="", amount=10**7)
    correct.result()
    account = house.account()
    assert (account.owed, account.topup) == (0, 6_000_000)


def test_a_postpaid_tenant_owes_up_to_its_limit_and_no_more(house: TestLedger) -> None:
    house.accounts.set_credit_limit("acme", 10**7, by="test")
    hold = house.reserve("r1", UNITS + 10**7)
    with pytest.raises(InsufficientBalance):
        house.reserve("r2", 1)
    house.settle(hold, Usage(output=500_005))
    account = house.account()
    assert (account.owed, account.available) == (10**7, 0)
    with pytest.raises(InsufficientBalance):
        house.reserve("r3", 1)


def test_days_begin_at_midnight_of_utc(house: TestLedger) -> None:
    house.clock.now_ns += 86_400 * NS - 1  # the last instant of the first of January 2025
    house.charge("r1", Usage(output=1))
    house.clock.now_ns += 1
    house.charge("r2", Usage(output=1))
    with house.ledger.store.reading() as connection:
        days = [row["day"] for row in store_reports.daily(connection, "acme")]
    assert days == [20_089, 20_090]  # days since 1970


def test_a_charge_that_a_crash_left_says_so(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'crashed.sqlite3'}"
    with running_ledger(url) as house:
        house.reserve("r1", 0)
    with running_ledger(url) as house, house.ledger.store.reading() as connection:
        charged = store_reports.find_request(connection, "acme", "r1")
    assert charged is not None and charged.details["outcome"] == Outcome.CRASHED


def test_a_hold_that_its_server_renewed_is_not_ended_by_another(house: TestLedger) -> None:
    hold = house.reserve("r1", 10)
    expired_at_ns = house.clock() + 60 * NS  # as the other read it
    house.clock.advance(50)
    house.ledger.top_up(hold, 1).result()
    reap = Reap("acme", "r1", Outcome.LAPSED, expired_at_ns)
    results, _ = house.ledger.store.apply([reap], house.ledger.book, house.clock)
    assert results == [None]
    assert house.account().held == 11


def test_time_goes_back_for_no_entry_and_no_lease(house: TestLedger) -> None:
    hold = house.reserve("r1", 10)
    (before,) = house.ledger.store.all_holds()
    house.clock.advance(-1000)
    house.ledger.top_up(hold, 1).result()
    (after,) = house.ledger.store.all_holds()
    assert before.expires_ns == after.expires_ns
    charged = house.settle(hold, WHOLE).entry
    assert charged.at_ns == house.clock() + 1000 * NS
