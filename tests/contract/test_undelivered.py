"""An answer that never arrived is not paid as well as its retry, in whichever order they end."""

import pytest
from sqlalchemy import select

from billing.gate.commands import Command, Settle
from billing.gate.holds import Hold
from billing.gate.outcomes import Outcome
from billing.idempotency import Claimed, Idempotency
from billing.money import UNITS
from billing.store.schema import undelivered
from billing.usage import Usage
from tests.support.billing import TestLedger

USAGE = Usage(hit_disk=900, miss=100, output=7)  # launch card: 204,000,000 units
PRICE = 204_000_000


def lost(hold: Hold) -> Settle:
    return Settle(hold, USAGE, Outcome.CLIENT_GONE, delivered=False)


def arrived(hold: Hold) -> Settle:
    return Settle(hold, USAGE, Outcome.FINISHED, delivered=True)


def run(house: TestLedger, *batches: list[Command]) -> int:
    """What the tenant has paid after these transactions."""
    for batch in batches:
        house.ledger.store.apply(batch, house.ledger.book, house.clock)
    return UNITS - house.account().topup


@pytest.fixture
def requests(house: TestLedger) -> tuple[Hold, Hold]:
    """A request and the silent retry of it, both running."""
    house.fund(UNITS)
    first = house.reserve("r1", UNITS // 4, fingerprint="f")
    return first, house.reserve("r2", UNITS // 4, fingerprint="f", is_retry=True)


def test_both_may_be_settled_in_one_transaction(
    house: TestLedger, requests: tuple[Hold, Hold]
) -> None:
    first, retry = requests
    assert PRICE == run(house, [lost(first), arrived(retry)])


def test_both_may_be_settled_in_one_transaction_the_retry_first(
    house: TestLedger, requests: tuple[Hold, Hold]
) -> None:
    first, retry = requests
    assert PRICE == run(house, [arrived(retry), lost(first)])


def test_the_retry_may_end_before_the_first_is_seen_to_be_gone(
    house: TestLedger, requests: tuple[Hold, Hold]
) -> None:
    first, retry = requests
    house.ledger.top_up(first, usage=USAGE).result()  # writes its hold anew
    assert PRICE == run(house, [arrived(retry)], [lost(first)])


def test_a_first_request_that_arrives_after_its_retry_is_paid(
    house: TestLedger, requests: tuple[Hold, Hold]
) -> None:
    first, retry = requests
    assert 2 * PRICE == run(house, [arrived(retry)], [arrived(first)])


def test_another_request_that_runs_beside_a_retry_is_paid(
    house: TestLedger, requests: tuple[Hold, Hold]
) -> None:
    other = house.reserve("r3", UNITS // 4, fingerprint="g")
    assert 2 * PRICE == run(house, [arrived(requests[1])], [lost(other)])


def test_an_answer_may_be_lost_after_it_was_settled(
    house: TestLedger, requests: tuple[Hold, Hold]
) -> None:
    first, retry = requests
    assert PRICE == run(house, [arrived(first)])
    assert PRICE == run(house, [lost(first)])
    assert PRICE == run(house, [arrived(retry)])


def test_a_late_word_that_the_answer_was_lost_is_heard(
    house: TestLedger, requests: tuple[Hold, Hold]
) -> None:
    """Its charge was presumed to be nothing; what counts is what is left of it."""
    first, retry = requests
    house.ledger._leases[first.key] = 0
    assert house.ledger.sweep() == 1
    assert PRICE == run(house, [lost(first)])
    assert PRICE == run(house, [arrived(retry)])


def test_a_retry_does_not_pay_for_itself(house: TestLedger) -> None:
    house.fund(UNITS)
    retry = house.reserve("r2", UNITS // 4, fingerprint="f", is_retry=True)
    assert PRICE == run(house, [lost(retry)], [arrived(retry)])


def test_a_request_that_was_thought_dead_is_noted_once(house: TestLedger) -> None:
    """It held nothing for half a minute, its key was given away, and then it ran and was lost."""
    house.fund(UNITS)
    keys = Idempotency(house.ledger.store, clock_ns=house.clock)
    keys.begin("acme", "k", b"body", "r1", fingerprint="f")
    house.clock.advance(31)
    assert keys.begin("acme", "k", b"body", "r2", fingerprint="f") == Claimed(lost="r1")
    first = house.reserve("r1", UNITS // 4, fingerprint="f")
    retry = house.reserve("r2", UNITS // 4, fingerprint="f", is_retry=True)
    assert PRICE == run(house, [lost(first)], [arrived(retry)])


def test_a_retry_a_day_later_is_a_request_of_its_own(
    house: TestLedger, requests: tuple[Hold, Hold]
) -> None:
    first, retry = requests
    run(house, [lost(first)])
    house.clock.advance(24 * 3600)
    assert 2 * PRICE == run(house, [arrived(retry)])


def test_lost_answers_are_noted_for_a_day(house: TestLedger, requests: tuple[Hold, Hold]) -> None:
    first, retry = requests
    run(house, [lost(first)])
    house.clock.advance(24 * 3600)
    run(house, [lost(retry)])
    with house.ledger.store.reading() as connection:
        noted = connection.execute(select(undelivered.c.request_id)).scalars().all()
    assert noted == ["r2"]
