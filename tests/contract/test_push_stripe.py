"""Charges reach Stripe's meters once, whatever happens on the way, and the sums are compared.

The service here follows docs.stripe.com/api/billing/meter-event and /v2/billing/meter-event-stream.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import orjson
import pytest
from typer.testing import CliRunner

from billing.errors import ExportError
from billing.invoices.register import InvoiceRegister
from billing.money import UNITS
from billing.push import delivery, post
from billing.push.receiver import find_format
from billing.push.reconcile import reconcile_sums
from billing.push.stripe import StripeMeters
from billing.usage import Usage
from cachesvc.cli import app
from tests.contract.metering import Reply, Service
from tests.support.billing import TestLedger

CUSTOMERS = {"acme": "cus_1"}
METERS = {"tokens": "llm_tokens", "amount": "llm_spend"}


class Stripe(Service):
    """Meter events by identifier; `window` is how old a timestamp may be, in seconds."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.events: dict[str, dict[str, Any]] = {}
        self.sessions: list[str] = []
        self.calls_left = 0  # of the session
        self.now_s, self.key = 1_735_689_600, "sk_test_1"
        self.num_duplicates = 0

    def answer(
        self, method: str, path: str, query: dict[str, str], headers: Mapping[str, str], body: bytes
    ) -> Reply:
        bearer = headers["authorization"].removeprefix("Bearer ")
        if path == "/v2/billing/meter_event_stream":
            return self.stream(bearer, headers, body)
        if bearer != self.key:
            return 401, {"error": {"message": "Invalid API Key provided"}}
        match method, path.split("/"):
            case "POST", [_, "v1", "billing", "meter_events"]:
                return self.single(headers, body)
            case "POST", [_, "v2", "billing", "meter_event_session"]:
                self.sessions.append(f"token_{len(self.sessions)}")
                self.calls_left = 2
                return 200, {"authentication_token": self.sessions[-1]}
            case "GET", [_, "v1", "billing", "meters"]:
                return 200, self.page(self.meters(), query)
            case "GET", [_, "v1", "billing", "meters", meter, "event_summaries"]:
                return 200, self.page(self.summaries(meter, query), query)
        return 404, {"error": {"message": f"Unrecognized request URL {path}"}}

    def single(self, headers: Mapping[str, str], body: bytes) -> Reply:
        self.check("form-urlencoded" in headers["content-type"], "not a form")
        form = dict(parse_qsl(body.decode(), strict_parsing=True))
        payload = {
            key[len("payload[") : -1]: value
            for key, value in form.items()
            if key.startswith("payload[")
        }
        event = {**form, "payload": payload, "timestamp": int(form["timestamp"])}
        return self.keep(event)

    def stream(self, bearer: str, headers: Mapping[str, str], body: bytes) -> Reply:
        if not self.sessions or bearer != self.sessions[-1] or not self.calls_left:
            return 401, {"error": {"code": "billing_meter_event_session_expired"}}
        self.calls_left -= 1
        self.check("stripe-version" in headers, "version 2 needs the header Stripe-Version")
        events = orjson.loads(body)["events"]
        self.check(0 < len(events) <= 100, "up to 100 events")
        for event in events:
            at = post_time(event["timestamp"])
            self.keep({**event, "timestamp": at})  # validated later: the answer is empty anyway
        return 200, {}

    def keep(self, event: dict[str, Any]) -> Reply:
        name = event["identifier"]
        self.check(len(name) <= 100, "an identifier has up to 100 characters")
        if event["event_name"] not in METERS.values():
            return 400, {"error": {"code": "no_meter", "message": "No active meter found"}}
        if event["payload"].get("stripe_customer_id") not in CUSTOMERS.values():
            return 400, {"error": {"code": "meter_event_customer_not_found"}}
        if not -300 <= self.now_s - event["timestamp"] <= 35 * 86_400:
            return 400, {"error": {"code": "timestamp_too_far_in_past", "message": "too old"}}
        value = Decimal(event["payload"]["value"])
        self.check(-value.as_tuple().exponent <= 12, "up to 12 places")  # type: ignore[operator]
        if name in self.events:
            self.num_duplicates += 1
            self.check(self.events[name] == event, "one identifier, two events")
            said = {"message": f"An event already exists with identifier {name}."}
            return 400, {"error": said | {"type": "invalid_request_error"}}
        self.events[name] = event
        return 200, {"object": "billing.meter_event", **event}

    def meters(self) -> list[dict[str, Any]]:
        return [{"id": f"mtr_{name}", "event_name": name} for name in METERS.values()]

    def summaries(self, meter: str, query: dict[str, str]) -> list[dict[str, Any]]:
        sums: dict[int, Decimal] = defaultdict(Decimal)
        for event in self.events.values():
            day_s = event["timestamp"] // 86_400 * 86_400
            is_asked = int(query["start_time"]) <= event["timestamp"] < int(query["end_time"])
            is_theirs = event["payload"]["stripe_customer_id"] == query["customer"]
            if f"mtr_{event['event_name']}" == meter and is_asked and is_theirs:
                sums[day_s] += Decimal(event["payload"]["value"])
        return [
            {"id": f"sum_{day_s}", "start_time": day_s, "aggregated_value": float(value)}
            for day_s, value in sorted(sums.items(), reverse=True)
        ]

    def page(self, rows: list[dict[str, Any]], query: dict[str, str]) -> dict[str, Any]:
        """One row a page, so that a reader that stops early is seen."""
        ids = [row["id"] for row in rows]
        first = ids.index(query["starting_after"]) + 1 if "starting_after" in query else 0
        return {"object": "list", "data": rows[first : first + 1], "has_more": first + 1 < len(ids)}


def post_time(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp())


@pytest.fixture
def stripe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stripe]:
    monkeypatch.setattr(post, "FIRST_WAIT_S", 0.001)
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    stripe = Stripe(seed)
    yield stripe
    assert stripe.problems == []
    stripe.close()


def meters_at(stripe: Stripe, path: str = "", **meters: str) -> StripeMeters:
    return StripeMeters(stripe.url + path, stripe.key, "cachesvc", CUSTOMERS, meters or METERS)


def drain(house: TestLedger, to: StripeMeters) -> delivery.ExportResult:
    for _ in range(200):
        with suppress(ExportError):
            return delivery.deliver(house.ledger.store, "push", to, house.clock)
    raise AssertionError("never taken")


def spend(house: TestLedger) -> None:
    """Two days of charges, a deposit, and a charge that was given back."""
    house.fund(UNITS)
    for number in range(6):
        house.charge(f"r{number}", Usage(hit_disk=64, miss=number + 1, output=7))
        house.clock.advance(9 * 3600)
    house.ledger.correct("acme", "r0", reference="back-1", by="ops", reason="wrong").result()


@pytest.mark.parametrize("path", ["", "/v2"])
def test_every_token_and_every_unit_arrives_once(
    house: TestLedger, stripe: Stripe, path: str
) -> None:
    spend(house)
    stripe.now_s = house.clock() // 10**9
    to = meters_at(stripe, path)
    assert {} == drain(house, to).refused
    spent = [event for event in stripe.events.values() if event["event_name"] == "llm_spend"]
    assert 7 == len(spent)  # six charges and what was given back of one
    tokens = [event for event in stripe.events.values() if event["event_name"] == "llm_tokens"]
    by_type: dict[str, int] = defaultdict(int)
    for event in tokens:
        by_type[event["payload"]["token_type"]] += int(event["payload"]["value"])
    assert {"hit_disk": 384, "miss": 21, "output": 42} == by_type
    # By hand: a million hits cost 0.1, computed tokens 1, output 2; the first was given back.
    expected = (384 - 64) * Decimal("0.0000001") + (21 - 1) * Decimal("0.000001")
    expected += (42 - 7) * Decimal("0.000002")
    assert expected == sum(Decimal(event["payload"]["value"]) for event in spent)
    stripe.is_wild = False
    report = reconcile_sums(house.ledger.store, "push", to)
    assert report.ok, report.as_json()
    assert (path == "/v2") == bool(stripe.sessions)


def test_a_day_that_stripe_lost_or_counted_twice_is_named(
    house: TestLedger, stripe: Stripe
) -> None:
    stripe.is_wild = False
    spend(house)
    stripe.now_s = house.clock() // 10**9
    to = meters_at(stripe, tokens="llm_tokens")
    drain(house, to)
    event = next(iter(stripe.events.values()))
    stripe.events["twice"] = event
    report = reconcile_sums(house.ledger.store, "push", to)
    assert ["cus_1 llm_tokens 2025-01-01: sent 219, Stripe has 283"] == report.differing
    del stripe.events["twice"]
    first_day = 1_735_689_600 + 86_400
    stripe.events = {k: v for k, v in stripe.events.items() if v["timestamp"] >= first_day}
    report = reconcile_sums(house.ledger.store, "push", to)
    assert ["cus_1 llm_tokens 2025-01-01: sent 219, Stripe has 0"] == report.missing


def test_an_event_too_old_for_stripe_is_refused_and_reported(
    house: TestLedger, stripe: Stripe
) -> None:
    stripe.is_wild = False
    house.fund(UNITS)
    house.charge("old", Usage(miss=5))
    house.clock.advance(40 * 86_400)
    house.charge("new", Usage(miss=6))
    stripe.now_s = house.clock() // 10**9
    done = drain(house, meters_at(stripe, tokens="llm_tokens"))
    assert ["cachesvc/acme/2/miss"] == list(done.refused)
    assert "timestamp_too_far_in_past" in done.refused["cachesvc/acme/2/miss"]
    assert ["cachesvc/acme/3/miss"] == list(stripe.events)


def test_a_tenant_without_a_customer_waits_until_it_has_one(
    house: TestLedger, stripe: Stripe
) -> None:
    stripe.is_wild = False
    spend(house)
    stripe.now_s = house.clock() // 10**9
    nobody = StripeMeters(stripe.url, stripe.key, "cachesvc", {}, METERS)
    done = drain(house, nobody)
    assert (["acme"], 0, {}) == (done.unknown, done.sent, stripe.events)
    assert 8 == drain(house, meters_at(stripe)).sent


def test_a_key_that_was_revoked_stops_the_stream(house: TestLedger, stripe: Stripe) -> None:
    stripe.is_wild, stripe.key = False, "sk_other"
    spend(house)
    to = StripeMeters(f"{stripe.url}/v2", "sk_test_1", "cachesvc", CUSTOMERS, METERS)
    with pytest.raises(ExportError, match=r"401.*Invalid API Key"):
        delivery.deliver(house.ledger.store, "push", to)
    assert {} == stripe.events


def test_the_command_takes_one_url_and_a_key(
    house: TestLedger, stripe: Stripe, tmp_path: Path, url: str
) -> None:
    stripe.is_wild = False
    spend(house)
    stripe.now_s = house.clock() // 10**9
    file = tmp_path / "key"
    file.write_text(stripe.key + "\n")
    run = CliRunner()
    to = f"stripe+{stripe.url}?tokens=llm_tokens&amount=llm_spend"
    export = ["usage", "export", "--to", to, "--database-url", url, "--data-dir", str(tmp_path)]
    left_out = run.invoke(app, [*export, "--token-file", str(file)])
    assert "tenant acme is left out" in left_out.stderr
    name_customer(house, "cus_1")
    sent = run.invoke(app, [*export, "--token-file", str(file)])
    assert (0, True) == (sent.exit_code, "8 entries sent" in sent.stderr), sent.output
    compared = run.invoke(app, [*export, "--token-file", str(file), "--reconcile", to])
    assert (0, True) == (compared.exit_code, orjson.loads(compared.stdout)["ok"])
    for wrong, said in (
        (f"stripe+{stripe.url}?tokn=x", "a stripe URL says amount and tokens"),
        (f"stripe+{stripe.url}?tokens=", "names nothing after a ="),
    ):
        with pytest.raises(ExportError, match=said):
            find_format(wrong, "key", "cachesvc", house.ledger.store)
    assert "stripe needs a key" in run.invoke(app, export).output


PARTIES = """
[seller]
name = "Seller"
address = ["Street 1"]
[[buyer]]
tenant = "acme"
name = "Acme"
address = ["Road 1"]
external_id = "{}"
"""


def name_customer(house: TestLedger, name: str) -> None:
    register = InvoiceRegister(house.ledger.store, clock_ns=house.clock)
    register.apply_parties(PARTIES.format(name), by="ops")
