"""Charges reach Lago once, whatever happens on the way, and are compared one by one.

The service here follows getlago/lago-api: a batch is saved whole, or refused by place with 422.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

import orjson
import pytest

from billing.errors import ExportError
from billing.money import UNITS
from billing.push import delivery, post
from billing.push.lago import LagoEvents, tells
from billing.push.reconcile import Reconciliation, read_events, reconcile
from billing.store import reports as store_reports
from billing.usage import CLASSES, Usage
from tests.contract.metering import Reply, Service
from tests.support.billing import TestLedger

FIELDS = {
    *("transaction_id", "external_subscription_id", "code", "timestamp"),
    *("precise_total_amount_cents", "properties"),
}


class Lago(Service):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.events: list[dict[str, Any]] = []
        self.poison = ""

    def answer(
        self, method: str, path: str, query: dict[str, str], headers: Mapping[str, str], body: bytes
    ) -> Reply:
        if headers["authorization"] != "Bearer key":
            return 401, {"status": 401, "error": "Unauthorized"}
        if (method, path) == ("POST", "/api/v1/events/batch"):
            return self.batch(orjson.loads(body)["events"])
        assert ("GET", "/api/v1/events") == (method, path)
        return self.page(int(query["page"]), query["code"])

    def batch(self, events: list[dict[str, Any]]) -> Reply:
        self.check(0 < len(events) <= 100, "up to 100 events")
        standing = {event["transaction_id"] for event in self.events}
        faults: dict[str, Any] = {}
        for place, event in enumerate(events):
            self.check(event.keys() == FIELDS, f"fields {event.keys()}")
            Decimal(event["timestamp"])
            if event["transaction_id"] in standing:
                faults[str(place)] = {"transaction_id": ["value_already_exist"]}
            elif event["transaction_id"] == self.poison:
                faults[str(place)] = {"timestamp": ["invalid_format"]}
        if faults:
            said = {"status": 422, "code": "validation_errors", "error_details": faults}
            return 422, said
        self.events += events
        self.dice.shuffle(self.events)
        return 200, {"events": events}

    def page(self, number: int, code: str) -> Reply:
        """Three events a page."""
        mine = [event for event in self.events if event["code"] == code]
        more = number + 1 if len(mine) > 3 * number else None
        return 200, {"events": mine[3 * (number - 1) : 3 * number], "meta": {"next_page": more}}


@pytest.fixture
def lago(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lago]:
    monkeypatch.setattr(post, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(LagoEvents, "batch", 4)
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    lago = Lago(seed)
    yield lago
    assert lago.problems == []
    lago.close()


def events_at(lago: Lago) -> LagoEvents:
    return LagoEvents(lago.url, "key", "ledger-1", {"acme": "sub_1"})


def drain(house: TestLedger, lago: Lago) -> delivery.ExportResult:
    for _ in range(200):
        with suppress(ExportError):
            return delivery.deliver(house.ledger.store, "push", events_at(lago), house.clock)
    raise AssertionError("never taken")


def compared(house: TestLedger, lago: Lago) -> Reconciliation:
    lago.is_wild = False
    found = read_events("", events_at(lago))
    return reconcile(house.ledger.store, "push", "ledger-1", found, tells)


def spend(house: TestLedger) -> None:
    house.fund(UNITS)
    for number in range(20):
        house.charge(f"r{number}", Usage(hit_disk=64, miss=number), user="u", tags={"team": "x"})
    house.ledger.correct("acme", "r0", reference="back-1", by="ops", reason="wrong").result()


def test_all_arrive_once_and_the_amounts_add_up(house: TestLedger, lago: Lago) -> None:
    spend(house)
    assert {} == drain(house, lago).refused
    assert 21 == len(lago.events)  # the deposit is no use
    report = compared(house, lago)
    assert (True, 21, 0) == (report.ok, report.sent, report.repeated)
    cents = sum(Decimal(event["precise_total_amount_cents"]) for event in lago.events)
    with house.ledger.store.reading() as connection:
        spent = store_reports.all_accounts(connection)["acme"].balances["revenue"]
    assert Decimal(spent) / UNITS * 100 == cents
    charged = next(e for e in lago.events if e["properties"]["kind"] == "charge")
    assert "sub_1" == charged["external_subscription_id"]
    assert set(CLASSES) <= charged["properties"].keys()
    assert ("u", "x") == tuple(charged["properties"][name] for name in ("user", "tag_team"))


def test_one_bad_event_of_a_batch_is_kept_aside_and_the_rest_arrive(
    house: TestLedger, lago: Lago
) -> None:
    lago.poison = "ledger-1/acme/7"
    spend(house)
    assert ["ledger-1/acme/7"] == list(drain(house, lago).refused)
    assert 20 == len(lago.events)
    report = compared(house, lago)
    assert (False, ["acme/7"], 1) == (report.ok, report.missing, report.refused)
    lago.poison = ""
    drain(house, lago)
    assert compared(house, lago).ok


def test_an_event_that_lago_lost_or_changed_is_named(house: TestLedger, lago: Lago) -> None:
    lago.is_wild = False
    spend(house)
    drain(house, lago)
    lago.events.sort(key=lambda event: int(event["transaction_id"].rsplit("/")[-1]))
    lago.events[0]["properties"]["hash"] = "00"
    del lago.events[1]
    report = compared(house, lago)
    assert (["acme/2"], ["acme/3"]) == (report.differing, report.missing)
    lago.events.clear()
    assert 21 == len(compared(house, lago).missing)
