"""An answer that never arrived is not paid as well as its retry, in whichever order they end; and
idempotency keys: replay, conflict, busy, and servers that died.
"""

import pytest
from sqlalchemy import select

from billing.errors import IdempotencyBusy, IdempotencyConflict
from billing.gate.commands import Reap, Settle, TopUp
from billing.gate.outcomes import Outcome
from billing.idempotency import Claimed, FirstAnswer, Idempotency
from billing.money import UNITS
from billing.store.schema import undelivered
from tests.support.billing import PRICE, USAGE, entries_of


def lost(hold):
    return Settle(hold, USAGE, Outcome.CLIENT_GONE, delivered=False)


def arrived(hold):
    return Settle(hold, USAGE, Outcome.FINISHED, delivered=True)


def run(house, *batches):
    """What the tenant has paid after these transactions."""
    for batch in batches:
        house.ledger.store.apply(batch, house.ledger.book, house.clock)
    return UNITS - house.account().topup


@pytest.fixture
def requests(house):
    """A request and the silent retry of it, both running."""
    house.fund(UNITS)
    first = house.reserve("r1", UNITS // 4, fingerprint="f")
    return first, house.reserve("r2", UNITS // 4, fingerprint="f", is_retry=True)


# Batches of commands, and how many requests are paid after each. 1 is a request, 2 and 4 are silent
# retries of it, 3 is another. They are lost (-), arrive (+), write progress (~) or lapse (x).
CASES = {
    "one transaction": ("1- 2+", [1]),
    "one transaction, the retry first": ("2+ 1-", [1]),
    "the retry ends before the first is seen to be gone": ("1~; 2+; 1-", [0, 1, 1]),
    "the first arrives after its retry": ("2+; 1+", [1, 2]),
    "another runs beside the retry": ("2+; 3-", [1, 2]),
    "an answer is lost after it was settled": ("1+; 1-; 2+", [1, 1, 1]),
    "an answer is lost after a lapsed charge was settled": ("1x; 1+; 1-; 2+", [0, 1, 1, 1]),
    "a retry pays for one answer": ("1-; 2+; 4+", [1, 1, 2]),
    "a retry that crashed pays for none": ("1-; 2x; 4+", [1, 1, 1]),
    "a retry does not pay for itself": ("2-; 2+", [1, 1]),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_and_its_retry_are_paid_once(house, requests, name):
    retried, other = {"fingerprint": "f", "is_retry": True}, {"fingerprint": "g"}
    more = [house.reserve("r3", 10**9, **other), house.reserve("r4", 10**9, **retried)]
    holds = dict(zip("1234", (*requests, *more), strict=True))
    says = {
        "-": lost,
        "+": arrived,
        "~": lambda hold: TopUp(hold, 0, 0, USAGE),
        "x": lambda hold: Reap(*hold.key, Outcome.LAPSED, None),
    }
    text, paid = CASES[name]
    batches = [[says[word[1]](holds[word[0]]) for word in part.split()] for part in text.split(";")]
    assert [n * PRICE for n in paid] == [run(house, batch) for batch in batches]


def test_a_late_word_that_the_answer_was_lost_is_heard(house, requests):
    """Its charge was presumed to be nothing; what counts is what is left of it."""
    first, retry = requests
    house.ledger._leases[first.key] = 0
    assert house.ledger.sweeper.sweep() == 1
    assert PRICE == run(house, [lost(first)])
    assert PRICE == run(house, [arrived(retry)])


def test_a_request_that_was_thought_dead_is_noted_once(house):
    """It held nothing for half a minute, its key was given away, and then it ran and was lost."""
    house.fund(UNITS)
    keys = Idempotency(house.ledger.store, clock_ns=house.clock)
    keys.begin("acme", "k", b"body", "r1", fingerprint="f")
    house.clock.advance(31)
    assert keys.begin("acme", "k", b"body", "r2", fingerprint="f") == Claimed(lost="r1")
    first = house.reserve("r1", UNITS // 4, fingerprint="f")
    retry = house.reserve("r2", UNITS // 4, fingerprint="f", is_retry=True)
    assert PRICE == run(house, [lost(first)], [arrived(retry)])


def test_a_retry_a_day_later_is_a_request_of_its_own_and_nothing_is_noted_longer(house, requests):
    first, retry = requests
    run(house, [lost(first)])
    house.clock.advance(24 * 3600)
    assert 2 * PRICE == run(house, [lost(retry)])
    with house.ledger.store.reading() as connection:
        noted = connection.execute(select(undelivered.c.request_id)).scalars().all()
    assert noted == ["r2"]
    again = house.reserve("r3", 10**9, fingerprint="f", is_retry=True)
    assert 2 * PRICE == run(house, [arrived(again)]), "r2 is given back, and r1 is not"


def test_an_idempotency_key_replays_conflicts_and_expires(house):
    keep = Idempotency(house.ledger.store, clock_ns=house.clock)
    assert isinstance(keep.begin("acme", "k", b"body", "r1"), Claimed)
    with pytest.raises(IdempotencyBusy):
        keep.begin("acme", "k", b"body", "r2")
    with pytest.raises(IdempotencyConflict):
        keep.begin("acme", "k", b"other", "r2")
    assert isinstance(
        keep.begin("other", "k", b"body", "r3"), Claimed
    )  # each tenant has its own keys
    keep.finish("acme", "k", "r1", 200, b"answer")
    assert keep.begin("acme", "k", b"body", "r2") == FirstAnswer("r1", 200, b"answer")
    house.clock.advance(24 * 3600)
    assert isinstance(keep.begin("acme", "k", b"other", "r4"), Claimed)


def test_an_idempotency_key_of_a_dead_request_is_free_again(house):
    keep = Idempotency(house.ledger.store, clock_ns=house.clock)
    house.fund(10)
    assert isinstance(keep.begin("acme", "k", b"body", "r1"), Claimed)
    hold = house.reserve("r1", 5)
    house.clock.advance(31)
    with pytest.raises(IdempotencyBusy):
        keep.begin("acme", "k", b"body", "r2")
    house.ledger.void(hold).result()
    assert isinstance(keep.begin("acme", "k", b"body", "r2"), Claimed)
    keep.abandon("acme", "k", "r2")
    assert isinstance(keep.begin("acme", "k", b"body", "r3"), Claimed)


def test_a_key_whose_server_died_is_free_at_once_and_its_request_pays_once(house):
    store = house.ledger.store
    house.fund(UNITS)
    first = Idempotency(store, owner="one", clock_ns=house.clock)
    first.begin("acme", "k", b"body", "r1", fingerprint="f")
    house.charge("r1", USAGE, fingerprint="f")  # and then it died, the answer not kept
    with pytest.raises(IdempotencyBusy):
        Idempotency(store, owner="two", clock_ns=house.clock).begin("acme", "k", b"body", "r2")
    again = Idempotency(store, owner="one", clock_ns=house.clock)
    begun = again.begin("acme", "k", b"body", "r3", fingerprint="f")
    assert begun == Claimed(lost="r1")
    house.charge("r3", USAGE, fingerprint="f", is_retry=True)
    assert house.account().topup == UNITS - PRICE
    given_back = entries_of(store)[-1]
    assert given_back.request_id == "retry:r1" and given_back.amount == PRICE
