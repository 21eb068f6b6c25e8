"""Budgets are told once each, signed, to a receiver that loses, repeats and comes back."""

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from billing.alerts.budgets import (
    Budget,
    BudgetAlert,
    BudgetSpan,
    BudgetWatch,
    Of,
    all_budgets,
    remove_budget,
    set_budget,
)
from billing.alerts.outbox import FIRST_RETRY_NS, TRIED_NS, Outbox
from billing.errors import InvalidName, UnknownBudget, UnknownTenant
from billing.money import UNITS
from billing.prices.book import NS
from billing.usage import Usage
from tests.support.billing import TestLedger

SECRET = b"s" * 32
CHARGE = Usage(miss=10**6)  # 1.00 CNY under the launch card


class Receiver:
    """A local HTTP server that answers as it is told, and keeps what it was sent."""

    def __init__(self) -> None:
        self.answers: list[int] = []  # the next statuses; then 204
        self.got: list[tuple[dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.got.append(({k.lower(): v for k, v in self.headers.items()}, body))
                status = receiver.answers.pop(0) if receiver.answers else 204
                if status:  # 0: it took the message and lost the connection
                    self.send_response(status)
                    self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    @property
    def ids(self) -> list[str]:
        return [json.loads(body)["id"] for _, body in self.got]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def make(house: TestLedger, name: str, amount: int, tenant: str = "acme", **rest: object) -> None:
    budget = Budget(name=name, tenant=tenant, amount=amount, **rest)  # type: ignore[arg-type]
    set_budget(house.accounts, budget, by="ops", now_ns=house.clock(), reason="agreed")


def told(watch: BudgetWatch, house: TestLedger) -> list[str]:
    return sorted(alert.id for alert in watch.look(house.clock()))


def test_spending_alerts_come_at_80_and_100_percent(house: TestLedger) -> None:
    house.fund(100 * UNITS)
    watch = BudgetWatch(house.ledger.store)
    make(house, "all", 5 * UNITS)
    make(house, "ann", UNITS, of=Of.USER, value="ann", span=BudgetSpan.DAY)
    make(house, "search", 2 * UNITS, of=Of.TAG, value="team=search")
    for number in range(3):
        house.charge(f"r{number}", CHARGE)
    assert [] == told(watch, house)
    house.charge("r3", CHARGE, user="ann", tags=(("team", "search"),))
    today = "2025-01-01"
    ann = [f"budget/ann/1.00/{today}/{percent}" for percent in (100, 80)]
    assert ["budget/all/5.00/2025-01/80", *ann] == told(watch, house)
    house.charge("r4", CHARGE, tags=(("team", "search"),))
    assert 6 == len(told(watch, house))  # all at 100 too, and search at 80 and 100
    house.clock.advance(86_400)
    assert not any("ann" in name for name in told(watch, house))
    assert told(BudgetWatch(house.ledger.store), house) == told(watch, house)  # as after a restart
    house.clock.advance(31 * 86_400)
    assert [] == told(watch, house)


@pytest.mark.parametrize("span", [BudgetSpan.DAY, BudgetSpan.MONTH])
@pytest.mark.parametrize(
    ("of", "value"),
    [(Of.TENANT, ""), (Of.KEY, "key_1"), (Of.USER, "ann"), (Of.TAG, "team=search")],
)
def test_each_of_them_has_a_budget_by_day_and_month(
    house: TestLedger, span: BudgetSpan, of: Of, value: str
) -> None:
    house.fund(100 * UNITS)
    make(house, "b", 2 * UNITS, of=of, value=value, span=span)
    about = {"key_id": "key_1", "user": "ann", "tags": (("team", "search"),)}
    house.charge("r1", CHARGE, **about)
    house.clock.advance(86_400)
    if of is not Of.TENANT:
        house.charge("other", CHARGE, key_id="key_2", user="bob", tags=(("team", "chat"),))
    watch = BudgetWatch(house.ledger.store)
    assert [] == told(watch, house)
    house.charge("r2", CHARGE, **about)
    month = [f"budget/b/2.00/2025-01/{percent}" for percent in (100, 80)]
    assert (month if span is BudgetSpan.MONTH else []) == told(watch, house)
    house.charge("r3", CHARGE, **about)
    day = [f"budget/b/2.00/2025-01-02/{percent}" for percent in (100, 80)]
    assert (month if span is BudgetSpan.MONTH else day) == told(watch, house)


def test_a_low_balance_alerts_once_after_each_payment(house: TestLedger) -> None:
    watch = BudgetWatch(house.ledger.store)
    make(house, "low", 2 * UNITS, span=BudgetSpan.BALANCE)
    assert ["balance/low/2.00/0"] == told(watch, house)
    house.fund(3 * UNITS)
    assert [] == told(watch, house)
    house.charge("r1", Usage(miss=2 * 10**6))
    assert ["balance/low/2.00/1"] == told(watch, house)


def test_an_hour_far_above_the_median_alerts_once(house: TestLedger) -> None:
    house.fund(1000 * UNITS)
    make(house, "spike", 2 * UNITS, span=BudgetSpan.SPIKE)
    make(house, "ann", 2 * UNITS, span=BudgetSpan.SPIKE, of=Of.USER, value="ann")
    watch = BudgetWatch(house.ledger.store)
    for hour in range(30):  # 1.00 an hour is usual
        house.charge(f"h{hour}", CHARGE)
        assert [] == told(watch, house), hour
        house.clock.advance(3600)
    for number in range(3):
        house.charge(f"r{number}", CHARGE)
    assert [] == told(watch, house)  # three times is not more than three times
    house.charge("r3", CHARGE)
    tenant = "spike/spike/2.00/2025-01-02T06:00Z"
    assert [tenant] == told(watch, house) == told(BudgetWatch(house.ledger.store), house)
    (alert,) = watch.look(house.clock())
    assert ("4.00", "1.00", "acme") == tuple(alert.data[k] for k in ("spent", "usual", "tenant"))
    house.clock.advance(3600)
    assert [] == told(watch, house)
    house.charge("a1", Usage(miss=2 * 10**6), user="ann")  # she was never there before
    assert ["spike/ann/2.00/2025-01-02T07:00Z"] == told(watch, house)


def test_a_new_monthly_budget_counts_hours_before_the_watched_day(house: TestLedger) -> None:
    house.fund(1000 * UNITS)
    make(house, "spike", 2 * UNITS, span=BudgetSpan.SPIKE)
    watch = BudgetWatch(house.ledger.store)
    house.charge("early", CHARGE)
    house.clock.advance(3 * 86_400)
    assert [] == told(watch, house)
    make(house, "month", UNITS)
    month = [f"budget/month/1.00/2025-01/{percent}" for percent in (100, 80)]
    assert month == told(watch, house)
    house.clock.advance(27 * 86_400)  # the last day of January
    for hour in range(24):
        house.charge(f"h{hour}", CHARGE)
        house.clock.advance(3600)
    house.charge("first", Usage(miss=2 * 10**6))
    february = [f"budget/month/1.00/2025-02/{percent}" for percent in (100, 80)]
    assert february == told(watch, house)  # twice the usual is no spike, also in a new month


def test_a_change_of_a_budget_is_in_the_trail(house: TestLedger) -> None:
    make(house, "b", UNITS)
    make(house, "b", 2 * UNITS)
    assert [2 * UNITS] == [budget.amount for budget in all_budgets(house.ledger.store)]
    remove_budget(house.accounts, "b", by="ops", now_ns=1, reason="over")
    with pytest.raises(UnknownBudget):
        remove_budget(house.accounts, "b", by="ops", now_ns=1, reason="over")
    actions = [row["action"] for row in house.accounts.trail.newest(3)]
    assert ["budget.remove", "budget.set", "budget.set"] == actions
    with pytest.raises(UnknownTenant):
        make(house, "b", 1, "nobody")
    with pytest.raises(InvalidName):
        make(house, "b", 1, of=Of.USER)


ALERTS = [
    BudgetAlert(f"a{number}", "cachesvc.balance.low.v1", {"tenant": "acme"}) for number in range(3)
]


def test_every_message_arrives_from_a_receiver_that_fails(
    house: TestLedger, receiver: Receiver
) -> None:
    store, now_ns = house.ledger.store, house.clock()
    outbox = Outbox(store, receiver.url, SECRET, source="s")
    assert 3 == outbox.take(ALERTS, now_ns)
    assert 0 == outbox.take(ALERTS, now_ns)  # known already
    receiver.answers = [503, 0, 500]
    for _ in range(8):
        outbox.deliver(now_ns)
        outbox = Outbox(store, receiver.url, SECRET, source="s")  # it restarts in between
        now_ns += 4 * FIRST_RETRY_NS
    assert {"a0", "a1", "a2"} == set(receiver.ids)
    assert 6 == len(receiver.got)  # three that failed came again
    assert 0 == outbox.deliver(now_ns + NS)


def test_a_message_is_signed_as_standard_webhooks_says(
    house: TestLedger, receiver: Receiver
) -> None:
    outbox = Outbox(house.ledger.store, receiver.url, SECRET, source="s")
    outbox.take(ALERTS[:1], house.clock())
    assert 1 == outbox.deliver(house.clock())
    ((headers, body),) = receiver.got
    text = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(SECRET, text, hashlib.sha256).digest()).decode()
    assert f"v1,{expected}" == headers["webhook-signature"]
    assert ("1.0", "acme") == (json.loads(body)["specversion"], json.loads(body)["subject"])


def test_a_receiver_that_is_away_for_days_is_given_up(house: TestLedger) -> None:
    outbox = Outbox(house.ledger.store, "http://127.0.0.1:9/hook", SECRET, source="s")
    outbox.take(ALERTS[:1], house.clock())
    assert 0 == outbox.deliver(house.clock() + TRIED_NS + NS)
    assert 0 == outbox.deliver(house.clock() + 2 * TRIED_NS)
