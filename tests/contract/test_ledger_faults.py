"""One command's fault stays its own, and what is said twice is done once."""

from concurrent.futures import Future

import pytest
from sqlalchemy import text

from billing import errors
from billing.gate.commands import Command, Reserve, Settle
from billing.gate.holds import Hold
from billing.gate.outcomes import Outcome
from billing.gate.work import Settled
from billing.money import UNITS
from billing.prices.book import NS
from billing.proof import audit
from billing.store.opening import open_store
from billing.usage import Usage
from tests.patience import until
from tests.support.billing import PRICE, USAGE, running_ledger


def test_what_cannot_be_encoded_fails_alone(house):
    house.fund(UNITS)
    pinned = house.ledger.book.at("model", house.clock(), "CNY")
    hold = house.reserve("r1", UNITS // 4)
    with house.ledger.store._lane:  # all three in one batch
        futures: list[Future[Settled] | Future[Hold]] = [
            house.ledger.settle(hold, USAGE, Outcome.FINISHED),
            house.ledger.reserve("acme", "\ud800", 1, pinned),
            house.ledger.reserve("acme", "r3", 1, pinned),
        ]
    assert isinstance(futures[0].result(10), Settled)
    assert futures[1].exception(10) is not None
    assert futures[2].exception(10) is None


def test_only_rows_that_exist_already_fail(house):
    """A projection edited by hand makes the database refuse an entry."""
    house.fund(UNITS)
    first, second = house.reserve("r1", 10), house.reserve("r2", 10)
    house.accounts.create_tenant("other", "CNY", by="test")
    other = house.reserve("o1", 0, tenant="other")
    with house.ledger.store.writing() as connection:
        connection.execute(text("UPDATE accounts SET seq = 0 WHERE tenant = 'acme'"))
    with house.ledger.store._lane:
        settling = [
            house.ledger.settle(hold, Usage(), Outcome.FINISHED) for hold in (first, other, second)
        ]
    with pytest.raises(errors.LedgerUnavailable, match=r"(?i)unique"):
        settling[0].result(10)
    assert settling[1].result(10).entry.tenant == "other"
    with house.ledger.store.writing() as connection:
        connection.execute(text("UPDATE accounts SET seq = 1 WHERE tenant = 'acme'"))
    for hold in (first, second):
        house.ledger.settle(hold, Usage(), Outcome.FINISHED).result(10)


def test_a_hold_that_was_taken_by_a_try_that_did_not_hear_of_it_is_the_same(house):
    """The connection broke between the commit and its answer."""
    house.fund(100)
    pinned = house.ledger.book.at("model", house.clock(), "CNY")
    hold = Hold("acme", "r1", pinned)
    asked = Reserve(hold, 60, house.clock() + 60 * NS, "server", house.ledger._boot)
    for _ in range(2):
        results, _ = house.ledger.store.apply([asked], house.ledger.book, house.clock)
        assert results == [hold]
    assert house.account().held == 60
    with pytest.raises(errors.DuplicateRequest):
        house.reserve("r1", 60)
    house.ledger.void(hold).result()


def test_a_request_id_that_is_taken_does_not_end_the_request_that_has_it(house):
    """A top-up renews its lease."""
    house.fund(100)
    hold = house.reserve("r1", 60)
    with pytest.raises(errors.DuplicateRequest):
        house.reserve("r1", 1)
    assert house.ledger.sweeper.sweep() == 0
    before = house.ledger._leases[hold.key]
    assert house.ledger.top_up(hold, 1, ttl_s=600).result() == 61
    assert house.ledger._leases[hold.key] > before + 300
    house.ledger.void(hold).result()


def test_no_lease_is_remembered_of_what_was_never_held(house):
    pinned = house.ledger.book.at("model", house.clock(), "CNY")
    with house.ledger.store._lane:
        asked = [house.ledger.reserve("acme", f"r{i}", 0, pinned, ttl_s=0) for i in range(9)]
        for future in asked[1:]:
            future.cancel()
    for future in asked:
        if not future.cancelled():
            future.result(10)
    house.ledger.sweeper.sweep()
    assert house.ledger._leases == {}


def test_a_batch_moves_every_account_that_it_touches(house):
    house.accounts.create_tenant("other", "CNY", credit_limit=None, by="test")
    house.fund(UNITS)
    holds = [house.reserve("r1", PRICE), house.reserve("r1", PRICE, tenant="other")]
    settling: list[Command] = [Settle(hold, USAGE, Outcome.FINISHED, True) for hold in holds]
    house.ledger.store.apply(settling, house.ledger.book, house.clock)
    accounts = [house.account(name) for name in ("acme", "other")]
    assert [(0, UNITS - PRICE), (0, -PRICE)] == [(it.held, it.balance) for it in accounts]
    assert audit.verify(house.ledger.store).revenue == {"CNY": 2 * PRICE}


def test_a_queue_that_is_full_refuses_at_once(house, monkeypatch):
    pinned = house.ledger.book.at("model", house.clock(), "CNY")
    monkeypatch.setattr("billing.inbox.QUEUE_LIMIT", 0)
    with pytest.raises(errors.LedgerUnavailable, match="too many"):
        house.ledger.reserve("acme", "r1", 0, pinned).result(10)


def test_an_admins_reference_is_not_one_of_the_ledgers_own(house):
    house.fund(UNITS)
    house.charge("r1", USAGE)
    for reference in ("late:r1", "retry:r1"):
        with pytest.raises(errors.InvalidName, match="the ledger's own"):
            house.correct("r1", reference)


def test_nobody_waits_for_a_ledger_that_was_closed(url):
    with running_ledger(url) as house:
        pinned = house.ledger.book.at("model", house.clock(), "CNY")
        house.ledger.close()
        house.ledger._commits.is_open = True  # who looked the moment before
        with pytest.raises(errors.LedgerClosed):
            house.ledger.reserve("acme", "r1", 0, pinned).result(10)
        house.ledger._commits.is_open = False


def test_a_hold_lives_no_longer_than_its_lease_and_a_sweep(house):
    """By the ledger's own thread, without a request."""
    house.fund(100)
    house.reserve("r1", 60, ttl_s=1)
    until(lambda: house.ledger.stats().swept)
    assert house.ledger.stats().swept == 1 and not house.account().held


def test_a_second_server_of_a_name_is_refused_while_the_first_runs(url):
    """It would settle the first one's running requests as those of its own earlier run."""
    first = open_store(url)
    first.claim("one/two")
    second = open_store(url)
    with pytest.raises(errors.StoreError, match=r"billing\.server_name"):
        second.claim("one/two", wait_s=0)
    second.claim("another", wait_s=0)
    first.close()
    third = open_store(url)
    third.claim("one/two", wait_s=0)
    for store in (second, third):
        store.close()
