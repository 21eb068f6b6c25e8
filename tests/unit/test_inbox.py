"""What the ledger takes at a time: drawn holds wait for others, and nothing that depends on them
comes first."""

from concurrent.futures import Future

import pytest

from billing import inbox as inboxes
from billing.errors import LedgerClosed
from billing.gate.commands import Allot, Command, Reserve, Settle
from billing.gate.holds import Hold, RequestContext
from billing.gate.outcomes import Outcome
from billing.inbox import Inbox
from billing.prices.book import PinnedRate, RateRef, Rates
from billing.usage import EMPTY

RATES = Rates(hit_device=1, hit_host=1, hit_disk=1, hit_remote=1, miss=2, output=3)
PINNED = PinnedRate(ref=RateRef("card", "1", "*", "base"), currency="CNY", pattern="*", rates=RATES)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Inbox:
    monkeypatch.setattr(inboxes, "WAIT_S", 0.001)
    return Inbox(clock)


def held(name: str, *, drawn: bool = True) -> Reserve:
    return Reserve(Hold("acme", name, PINNED), 1, 2**62, "s", "b", drawn=drawn)


def settled(name: str, *, retry: bool = False) -> Settle:
    context = RequestContext(fingerprint="f" if retry else "", is_retry=retry)
    return Settle(Hold("acme", name, PINNED, context), EMPTY, Outcome.FINISHED, True)


def put(inbox: Inbox, *commands: Command) -> "list[Future[object]]":
    return [inbox.put(command) for command in commands]


def take(inbox: Inbox) -> list[Command]:
    return [command for command, _ in inbox.take()]


def test_a_settlement_does_not_wait_for_holds_that_were_answered(inbox: Inbox) -> None:
    put(inbox, held("a"), settled("old"), held("b"))
    assert [settled("old")] == take(inbox)
    assert [] == take(inbox), "they are not due yet"


def test_holds_that_were_answered_are_written_together_once_due(inbox: Inbox, clock: Clock) -> None:
    put(inbox, held("a"))
    assert [] == take(inbox)
    put(inbox, held("b"), settled("old"))
    clock.now_s = inboxes.BEHIND_S
    assert [held("a"), held("b"), settled("old")] == take(inbox)
    assert [] == take(inbox)


@pytest.mark.parametrize(
    "command",
    [
        settled("a"),  # its own settlement
        settled("r", retry=True),  # marks the requests that run
        held("asking", drawn=False),
        Allot("acme", "s", "b", 0),  # gives back what the draws were out of
    ],
)
def test_what_depends_on_a_hold_comes_behind_it(inbox: Inbox, command: Command) -> None:
    put(inbox, held("a"))
    assert [] == take(inbox)
    put(inbox, held("b"), command)
    assert [held("a"), held("b"), command] == take(inbox)


def test_many_holds_are_due_at_once(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inboxes, "BATCH_LIMIT", 3)
    put(inbox, *(held(name) for name in "abcde"))
    assert [[], [held(name) for name in "abc"]] == [take(inbox), take(inbox)]
    assert [] == take(inbox), "two are not many"


def test_the_end_takes_what_was_put_before_and_refuses_the_rest(inbox: Inbox) -> None:
    put(inbox, held("a"))
    assert [] == take(inbox)
    put(inbox, settled("old"))
    inbox.end()
    (late,) = put(inbox, settled("late"))
    assert [held("a"), settled("old")] == take(inbox)
    assert inbox.is_over
    inbox.refuse_rest()
    with pytest.raises(LedgerClosed):
        late.result(10)


def test_a_cancelled_command_is_not_taken(inbox: Inbox) -> None:
    cancelled, _ = put(inbox, settled("a"), settled("b"))
    cancelled.cancel()
    assert [settled("b")] == take(inbox)
