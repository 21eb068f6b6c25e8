"""Idempotency keys on both databases: replay, conflict, busy, and servers that died."""

import pytest

from billing.errors import IdempotencyBusy, IdempotencyConflict
from billing.idempotency import Claimed, FirstAnswer, Idempotency
from billing.money import UNITS
from billing.usage import Usage
from tests.contract.conftest import entries
from tests.support.billing import TestLedger

USAGE = Usage(hit_disk=900, miss=100, output=7)  # launch card: 204,000,000 units
PRICE = 204_000_000


def test_an_idempotency_key_replays_conflicts_and_expires(house: TestLedger) -> None:
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


def test_an_idempotency_key_of_a_dead_request_is_free_again(house: TestLedger) -> None:
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


def test_a_key_whose_server_died_is_free_at_once_and_its_request_pays_once(
    house: TestLedger,
) -> None:
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
    given_back = entries(store)[-1]
    assert given_back.request_id == "retry:r1" and given_back.amount == PRICE
