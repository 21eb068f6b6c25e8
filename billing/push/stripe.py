"""Stripe's billing meters: one meter event for each token class of a charge, or for its amount.

`stripe+https://api.stripe.com?tokens=NAME&amount=NAME` names the `event_name` of the meters.
Version 1 takes one event a call, form-encoded; with the path `/v2` events go to the stream, 100 a
call, with the token of a session. Facts: docs.stripe.com/api/billing/meter-event and
/api/v2/billing/meter-event-stream, read in 2026: an `identifier` of up to 100 characters is dropped
for at least 24 hours if it comes again (version 1 answers 400 `duplicate_meter_event`), a timestamp
lies within the past 35 days, a value has up to 12 decimal places and may be negative.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode, urlsplit

import orjson

from billing.gate.entries import Entry, Kind
from billing.money import format_units
from billing.push.events import HAS_IT, HttpAnswer, HttpCall, PushEvent
from billing.reports.export import entry_id

TOKENS = "cachesvc_tokens"  # the meter if the URL names none
LONGEST_ID = 100
VERSION = "2024-09-30.acacia"  # the first with the stream
STREAM_HOSTS = {"api.stripe.com": "meter-events.stripe.com"}


class StripeMeters:
    """`customers` are Stripe's ids of tenants, `meters` event names by `tokens` and `amount`."""

    def __init__(
        self,
        url: str,
        token: str,
        source: str,
        customers: Mapping[str, str],
        meters: Mapping[str, str],
    ) -> None:
        parts = urlsplit(url)
        self._is_stream = parts.path.rstrip("/") == "/v2"
        self.batch = 100 if self._is_stream else 1
        self.api = f"{parts.scheme}://{parts.netloc}"
        stream_host = STREAM_HOSTS.get(parts.netloc, parts.netloc)
        self.url = f"{self.api}/v1/billing/meter_events"
        if self._is_stream:
            self.url = f"{parts.scheme}://{stream_host}/v2/billing/meter_event_stream"
        self.customers = customers
        self.meters = dict(meters) or {"tokens": TOKENS}
        self._source = source
        self._token = token

    def knows(self, tenant: str) -> bool:
        return tenant in self.customers

    def events(self, entry: Entry) -> list[PushEvent]:
        return [self._event(entry, *each) for each in self.values(entry)]

    def values(self, entry: Entry) -> Iterator[tuple[str, str, str]]:
        """For each meter of an entry: event name, counted class and value."""
        if entry.kind is Kind.CHARGE and "tokens" in self.meters:
            for name, count in entry.details.get("usage", {}).items():
                yield self.meters["tokens"], name, str(count)
        is_use = entry.kind in (Kind.CHARGE, Kind.CORRECTION)
        if is_use and entry.amount and "amount" in self.meters:
            yield self.meters["amount"], "amount", format_units(-entry.amount)

    def _event(self, entry: Entry, meter: str, of: str, value: str) -> PushEvent:
        name = f"{self._source}/{entry_id(entry)}/{of}"
        if len(name) > LONGEST_ID:
            name = hashlib.sha256(name.encode()).hexdigest()
        details = entry.details
        payload = {
            "stripe_customer_id": self.customers[entry.tenant],
            "value": value,
            **({"currency": entry.currency} if of == "amount" else {"token_type": of}),
            **{each: str(details[each]) for each in ("model", "project") if details.get(each)},
        }
        body = {
            "event_name": meter,
            "identifier": name,
            "timestamp": entry.moment_ns // 10**9,
            "payload": payload,
        }
        return PushEvent(name, entry.tenant, entry.seq, body)

    def session(self) -> HttpCall | None:
        if not self._is_stream:
            return None
        return HttpCall(
            f"{self.api}/v2/billing/meter_event_session", b"{}", self.headers(json=True)
        )

    def call(self, events: Sequence[PushEvent], token: str) -> HttpCall:
        if self._is_stream:
            data = orjson.dumps({"events": [_with_date(event.body) for event in events]})
            headers = self.headers(json=True) | {"authorization": f"Bearer {token}"}
            return HttpCall(self.url, data, headers)
        (event,) = events
        form = {key: event.body[key] for key in ("event_name", "identifier", "timestamp")}
        form |= {f"payload[{key}]": value for key, value in event.body["payload"].items()}
        return HttpCall(self.url, urlencode(form).encode(), self.headers())

    def headers(self, *, json: bool = False) -> dict[str, str]:
        kind = "application/json" if json else "application/x-www-form-urlencoded"
        version = {"stripe-version": VERSION} if json else {}
        return {"authorization": f"Bearer {self._token}", "content-type": kind, **version}

    def faults(self, answer: HttpAnswer, events: Sequence[PushEvent]) -> Mapping[int, str] | None:
        if len(events) > 1:
            return None
        try:
            error = orjson.loads(answer.body)["error"]
            has_it = error.get("code") == "duplicate_meter_event" or str(
                error.get("message", "")
            ).startswith("An event already exists with identifier")
        except (ValueError, KeyError, TypeError, AttributeError):
            has_it = False
        return {0: HAS_IT if has_it else answer.said}


def _with_date(body: Mapping[str, Any]) -> dict[str, Any]:
    at = datetime.fromtimestamp(body["timestamp"], UTC)
    return {**body, "timestamp": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
