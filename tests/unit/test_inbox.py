"""What the ledger takes at a time."""

import pytest

from billing import inbox as inboxes
from billing.errors import LedgerClosed
from billing.gate.commands import Settle
from billing.gate.holds import Hold
from billing.gate.outcomes import Outcome
from billing.inbox import Inbox
from billing.prices.book import PinnedRate, RateRef, Rates
from billing.usage import EMPTY

RATES = Rates(hit_device=1, hit_host=1, hit_disk=1, hit_remote=1, miss=2, output=3)
PINNED = PinnedRate(ref=RateRef("card", "1", "*", "base"), currency="CNY", pattern="*", rates=RATES)


@pytest.fixture
def inbox(monkeypatch):
    monkeypatch.setattr(inboxes, "WAIT_S", 0.001)
    return Inbox()


def settled(name):
    return Settle(Hold("acme", name, PINNED), EMPTY, Outcome.FINISHED, True)


def put(inbox, *commands):
    return [inbox.put(command) for command in commands]


def take(inbox):
    return [command for command, _ in inbox.take()]


def test_all_that_waits_is_taken_up_to_the_limit(inbox, monkeypatch):
    monkeypatch.setattr(inboxes, "BATCH_LIMIT", 3)
    put(inbox, *(settled(name) for name in "abcde"))
    assert [[settled(name) for name in batch] for batch in ("abc", "de", "")] == [
        take(inbox) for _ in range(3)
    ]


def test_the_end_takes_what_was_put_before_and_refuses_the_rest(inbox):
    put(inbox, settled("old"))
    inbox.end()
    (late,) = put(inbox, settled("late"))
    assert [settled("old")] == take(inbox)
    assert inbox.is_over
    inbox.refuse_rest()
    with pytest.raises(LedgerClosed):
        late.result(10)


def test_a_cancelled_command_is_not_taken(inbox):
    cancelled, _ = put(inbox, settled("a"), settled("b"))
    cancelled.cancel()
    assert [settled("b")] == take(inbox)
