"""Entries and decisions are changed, and every hash is made anew: `verify` says what is wrong."""

import pytest

from billing.gate.entries import Kind
from billing.money import UNITS
from billing.prices.cards import parse_card
from billing.proof import audit
from tests.contract.forging import change, copy, forging, problems
from tests.support.billing import USAGE, card_text, priced, running_ledger

LATER = card_text("later", priced("*", "0.2", "2", "4"), valid_from="2025-01-01T00:00:30Z")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Entries 1: a top-up, 2 and 3: charges, 4: a correction of 2, 5: a withdrawal."""
    path = tmp_path_factory.mktemp("ledger") / "original"
    with running_ledger(f"sqlite:///{path}") as house:
        house.fund(UNITS)
        house.charge("r1", USAGE)
        house.clock.advance(1)
        house.charge("r2", USAGE)
        house.correct("r1", "c", 5, "agreed")
        house.deposit(Kind.WITHDRAWAL, 7, "w", reason="agreed")
        assert audit.verify(house.ledger.store).problems == []
    return path


@pytest.fixture
def forged(original, tmp_path):
    return copy(original, tmp_path / "forged")


def forge(path, seq, changed):
    with forging(path) as plain:
        change(plain, f"UPDATE entries SET {changed} WHERE seq = {seq}")


@pytest.mark.parametrize(
    ("seq", "change", "invariant", "said"),
    [
        (1, "postings = 'granted:1000000000000 cash:-1000000000000'", "balanced", "granted"),
        (2, "postings = 'topup:-5 revenue:5'", "rated", "expected"),
        (2, "body = replace(body, '\"output\":7', '\"output\":6')", "rated", "expected"),
        (2, 'body = replace(body, \'"saved":"\', \'"saved":"1\')', "rated", "saved"),
        (2, "kind = 'gift'", "readable", "not a kind"),
        (3, "at_ns = at_ns - 2000000000", "gapless", "before"),
        (3, "currency = 'USD'", "balanced", "USD"),
        (4, "postings = 'granted:5 revenue:-5'", "corrected", "granted"),
        (4, "postings = 'topup:204000001 revenue:-204000001'", "corrected", "more than"),
        (4, "body = replace(body, 'ects\":2', 'ects\":1')", "corrected", "not an earlier charge"),
        (4, "corrects = 3", "corrected", "not an earlier charge"),
        (4, 'body = replace(body, \'"by":"ops"\', \'"by":"system"\')', "corrected", "gives back"),
    ],
)
def test_a_forged_entry_is_named(forged, seq, change, invariant, said):
    forge(forged, seq, change)
    first = problems(forged)[0]
    assert (first.tenant, first.seq, first.invariant) == ("acme", seq, invariant)
    assert said in first.message


@pytest.mark.parametrize(
    ("seq", "change", "said"),
    [
        (1, "postings = 'topup:2000000000000 cash:-2000000000000'", "its amount differs"),
        (1, 'body = replace(body, \'"by":"test"\', \'"by":"eve"\')', "its actor differs"),
        (1, 'body = replace(body, \'"by":"test"\', \'"by":"system"\')', "its actor differs"),
        (4, "postings = 'topup:6 revenue:-6'", "its amount differs"),
        (5, "postings = 'topup:-8 cash:8'", "its amount differs"),
        (5, "body = replace(body, 'agreed', 'a bribe')", "its reason differs"),
    ],
)
def test_a_forged_deposit_is_not_what_was_decided(forged, seq, change, said):
    forge(forged, seq, change)
    (problem,) = problems(forged, rebuilt=True)
    assert (problem.tenant, problem.seq, problem.invariant) == ("acme", seq, "decided")
    assert said in problem.message


def test_an_entry_that_nobody_decided_and_a_decision_that_nothing_books(forged):
    with forging(forged) as plain:
        change(plain, "UPDATE trail SET subject = 'acme/9' WHERE subject = 'acme/5'")
    said = [str(problem) for problem in problems(forged, rebuilt=True)]
    assert any("it has no decision" in each for each in said)
    assert any("acme/9 was decided, but no entry books it" in each for each in said)


def test_a_charge_by_a_card_that_was_not_in_force_is_named(tmp_path):
    path = tmp_path / "ledger"
    with running_ledger(f"sqlite:///{path}") as house:
        house.fund(UNITS)
        house.accounts.apply_card(parse_card(LATER), by="ops")
        house.charge("before", USAGE)
        house.clock.advance(3600)
        house.charge("after", USAGE)
        assert audit.verify(house.ledger.store).problems == []
        old = house.ledger.book.cards[0].at("model", house.clock())
        about = house.reserve("cheap", 0).context
        hold = house.ledger.reserve("acme", "forged", 0, old, context=about).result()
        house.settle(hold, USAGE)
        (problem,) = audit.verify(house.ledger.store).problems
    assert problem.request_id == "forged"
    assert "later 1 was in force when it was admitted" in problem.message


def test_when_a_card_was_applied_is_proved(forged):
    with forging(forged) as plain:
        change(plain, "UPDATE rate_cards SET applied_ns = applied_ns - 1")
    (problem,) = problems(forged, rebuilt=True)
    assert "its applied_ns is" in problem.message
