"""Events reach a receiver that loses, repeats and reorders them; the report tells what it has."""

import json
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from billing.errors import ExportError
from billing.money import UNITS
from billing.push import cloudevents, delivery, post
from billing.push.cloudevents import CloudEvents
from billing.push.reconcile import read_events, reconcile
from billing.store import alerts
from billing.usage import Usage
from tests.support.billing import TestLedger

SOURCE = "ledger-1"


class Meter:
    """Takes batches of events; fails, loses its answer, keeps twice and mixes, as its dice say."""

    def __init__(self, seed: int) -> None:
        self.dice, self.events, self.tokens = random.Random(seed), [], set[str | None]()
        self.is_wild, self.num_asked, self.poison = True, 0, ""
        self.refusal: tuple[int, bytes] | None = None
        meter = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                meter.tokens.add(self.headers["authorization"])
                meter.num_asked += 1
                is_poisoned = meter.poison in [event["id"] for event in body]
                refusal = (400, b"no such meter") if is_poisoned else meter.refusal
                if refusal:
                    self.send_response(refusal[0])
                    self.end_headers()
                    self.wfile.write(refusal[1])
                    return
                what = meter.dice.choice(["take", "take", "twice", "refuse", "lose the answer"])
                what = what if meter.is_wild else "take"
                if what != "refuse":
                    meter.keep(body * (2 if what == "twice" else 1))
                if what == "lose the answer":
                    return  # the connection ends without a word
                self.send_response(503 if what == "refuse" else 204)
                self.end_headers()

            def do_GET(self) -> None:
                data = json.dumps([{"event": each} for each in meter.events]).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/api/v1/events"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def keep(self, events: list[Any]) -> None:
        self.events += events
        self.dice.shuffle(self.events)

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meter]:
    monkeypatch.setattr(post, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(cloudevents.CloudEvents, "batch", 3)
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    meter = Meter(seed)
    yield meter
    meter.close()


def drain(house: TestLedger, meter: Meter) -> None:
    """As often as it takes: a cron job runs it again."""
    for _ in range(100):
        with suppress(ExportError):
            done = delivery.deliver(
                house.ledger.store, "push", CloudEvents(meter.url, "secret", SOURCE)
            )
            assert not done.refused
            return
    raise AssertionError("never taken")


def test_all_arrive_whatever_the_receiver_does(house: TestLedger, meter: Meter) -> None:
    house.fund(UNITS)
    for number in range(20):
        house.charge(f"r{number}", Usage(miss=number))
    drain(house, meter)
    found = read_events(meter.url)
    report = reconcile(house.ledger.store, "push", SOURCE, found)
    assert (True, 21) == (report.ok, report.sent)
    assert report.found == len(found) == report.sent + report.repeated
    assert {"Bearer secret"} == meter.tokens
    house.charge("later", Usage(miss=1))  # not sent yet, and not missed
    assert reconcile(house.ledger.store, "push", SOURCE, found).ok


def test_what_a_receiver_lost_changed_or_made_up_is_named(
    house: TestLedger, meter: Meter, tmp_path: Path
) -> None:
    meter.is_wild = False
    house.fund(UNITS)
    for number in range(4):
        house.charge(f"r{number}", Usage(miss=number))
    drain(house, meter)
    events = sorted(meter.events, key=lambda event: event["id"])
    events[1]["data"]["hash"] = "00"
    made_up = {**events[2], "id": "acme/99"}
    elsewhere = {**events[2], "id": "acme/98", "source": "ledger-2"}
    file = tmp_path / "events.jsonl"
    kept = [*events[1:], events[3], made_up, elsewhere]
    file.write_text("\n".join(json.dumps(event) for event in kept))
    report = reconcile(house.ledger.store, "push", SOURCE, read_events(str(file))).as_json()
    assert {"missing": ["acme/1"], "differing": ["acme/2"], "unknown": ["acme/99"]} == report["ids"]
    assert (False, 1) == (report["ok"], report["repeated"])


def test_a_refused_event_is_kept_reported_and_retried(house: TestLedger, meter: Meter) -> None:
    house.fund(UNITS)
    for number in range(5):
        house.charge(f"r{number}", Usage(miss=number))
    meter.is_wild, meter.poison = False, "acme/3"
    store, to = house.ledger.store, CloudEvents(meter.url, "", SOURCE)
    done = delivery.deliver(store, "push", to)
    assert {"acme/3": "400 no such meter"} == done.refused
    assert 6 == done.sent
    with store.reading() as connection:
        (told,) = alerts.due_messages(connection, 2**62, 10)
    assert "cachesvc.export.refused.v1" == json.loads(told["body"])["type"]
    report = reconcile(store, "push", SOURCE, read_events(meter.url))
    assert (False, 1, ["acme/3"]) == (report.ok, report.refused, report.missing)
    again = delivery.deliver(store, "push", to)
    assert (0, ["acme/3"]) == (again.sent, list(again.refused))
    meter.poison = ""
    assert {} == delivery.deliver(store, "push", to).refused
    assert reconcile(store, "push", SOURCE, read_events(meter.url)).ok
    assert 6 == len(meter.events)


def test_a_receiver_that_refuses_everything_is_set_up_wrongly_and_nothing_is_skipped(
    house: TestLedger, meter: Meter
) -> None:
    house.fund(UNITS)
    for number in range(30):
        house.charge(f"r{number}", Usage(miss=number))
    meter.is_wild, meter.refusal = False, (400, b"no such meter")
    store, to = house.ledger.store, CloudEvents(meter.url, "", SOURCE)
    with pytest.raises(ExportError, match=r"refused the first 20 events.*no such meter"):
        delivery.deliver(store, "push", to)
    meter.refusal = None
    drain(house, meter)
    assert reconcile(store, "push", SOURCE, read_events(meter.url)).ok
    assert 31 == len(meter.events)


def test_a_wrong_key_stops_the_export_at_once(house: TestLedger, meter: Meter) -> None:
    house.fund(UNITS)
    meter.is_wild, meter.refusal = False, (401, b"no such key")
    to = CloudEvents(meter.url, "", SOURCE)
    with pytest.raises(ExportError, match="401 no such key; they are sent again"):
        delivery.deliver(house.ledger.store, "push", to)
    assert 1 == meter.num_asked  # asking again would not help
    meter.refusal = None
    drain(house, meter)
    assert ["acme/1"] == [event["id"] for event in meter.events]
    with pytest.raises(ExportError, match="not an event"):
        reconcile(house.ledger.store, "push", SOURCE, ["x"])
    with pytest.raises(ExportError, match="holds no events"):
        read_events("/nowhere/at/all")
