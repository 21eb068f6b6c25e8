"""Events reach a receiver that loses, repeats and reorders them; the report tells what it has."""

import json
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from billing.errors import ExportError
from billing.money import UNITS
from billing.reports import export, push
from billing.reports.push import Receiver, read_events, reconcile
from billing.testing import TestLedger
from billing.usage import Usage

SOURCE = "ledger-1"


class Meter:
    """Takes batches of events; fails, loses its answer, keeps twice and mixes, as its dice say."""

    def __init__(self, seed: int) -> None:
        self.dice, self.events, self.tokens = random.Random(seed), [], set[str | None]()
        self.is_wild, self.refusal, self.num_asked = True, b"", 0
        meter = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                meter.tokens.add(self.headers["authorization"])
                meter.num_asked += 1
                if meter.refusal:
                    self.send_response(400)
                    self.end_headers()
                    self.wfile.write(meter.refusal)
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
    monkeypatch.setattr(push, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(push, "BATCH", 3)
    monkeypatch.setattr(export, "CHUNK", 7)
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    meter = Meter(seed)
    yield meter
    meter.close()


def drain(house: TestLedger, meter: Meter) -> None:
    """As often as it takes: a cron job runs it again."""
    sink = partial(Receiver(meter.url, "secret").take, source=SOURCE)
    for _ in range(100):
        with suppress(ExportError):
            export.drain(house.ledger.store, "push", sink)
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


def test_a_receiver_that_refuses_is_told_and_nothing_is_skipped(
    house: TestLedger, meter: Meter
) -> None:
    house.fund(UNITS)
    meter.is_wild, meter.refusal = False, b"no such meter"
    sink = partial(Receiver(meter.url).take, source=SOURCE)
    with pytest.raises(ExportError, match="400 no such meter; they are sent again"):
        export.drain(house.ledger.store, "push", sink)
    assert 1 == meter.num_asked  # asking again would not help
    meter.refusal = b""
    drain(house, meter)
    assert ["acme/1"] == [event["id"] for event in meter.events]
    with pytest.raises(ExportError, match="no event"):
        reconcile(house.ledger.store, "push", SOURCE, ["x"])
    with pytest.raises(ExportError, match="holds no events"):
        read_events("/nowhere/at/all")
