"""Lago's usage events: one for each charge and correction, its tokens and amount as properties.

`lago+https://api.getlago.com?code=NAME` names the code of the billable metrics. A tenant's external
subscription id is its name, unless its buyer has another. Facts: getlago/lago-api,
events_controller and services/events, read in 2026: a batch of up to 100 is saved whole or not at
all, refused with 422 and `error_details` by place; a `transaction_id` that stands is
`value_already_exist`.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

import orjson

from billing.gate.entries import Entry, Kind
from billing.money import format_units
from billing.push.events import HAS_IT, Format, HttpAnswer, HttpCall, PushEvent
from billing.reports.export import entry_id
from billing.usage import CLASSES

CODE = "cachesvc"
SHOWN = ("model", "project", "key", "session", "user")


class LagoEvents(Format):
    """A `Format`: usage events of Lago for one URL."""

    batch = 100

    def __init__(
        self, url: str, token: str, source: str, customers: Mapping[str, str], code: str = CODE
    ) -> None:
        parts = urlsplit(url)
        self._events = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}/api/v1/events"
        self.url = f"{self._events}/batch"
        self._token = token
        self._source = source
        self._customers = customers
        self._code = code or CODE

    def events(self, entry: Entry) -> list[PushEvent]:
        if not tells(entry):
            return []
        name = f"{self._source}/{entry_id(entry)}"
        body = {
            "transaction_id": name,
            "external_subscription_id": self._customers.get(entry.tenant, entry.tenant),
            "code": self._code,
            "timestamp": format_units(entry.moment_ns // 10**6 * 10**9),  # seconds, as a decimal
            "precise_total_amount_cents": format_units(-entry.amount * 100),
            "properties": _properties(entry),
        }
        return [PushEvent(name, entry.tenant, entry.seq, body)]

    def call(self, events: Sequence[PushEvent], token: str) -> HttpCall:
        data = orjson.dumps({"events": [event.body for event in events]})
        return HttpCall(self.url, data, self._headers())

    def page(self, number: int) -> HttpCall:
        """The call for a page of Lago's events."""
        query = urlencode({"code": self._code, "page": number, "per_page": 100})
        return HttpCall(f"{self._events}?{query}", None, self._headers())

    def _headers(self) -> dict[str, str]:
        bearer = {"authorization": f"Bearer {self._token}"} if self._token else {}
        return {"content-type": "application/json", **bearer}

    def faults(self, answer: HttpAnswer, events: Sequence[PushEvent]) -> Mapping[int, str] | None:
        try:
            details = orjson.loads(answer.body)["error_details"]
            places = {int(place): fault for place, fault in details.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return {0: answer.said} if len(events) == 1 else None
        if not places or not all(0 <= place < len(events) for place in places):
            return None
        return {place: _fault(fault) for place, fault in places.items()}


def tells(entry: Entry) -> bool:
    """Whether an entry is sent to Lago: usage is, deposits are not."""
    return entry.kind in (Kind.CHARGE, Kind.CORRECTION)


def _fault(details: Any) -> str:
    if details == {"transaction_id": ["value_already_exist"]}:
        return HAS_IT
    return orjson.dumps(details).decode()[:200]


def _properties(entry: Entry) -> dict[str, Any]:
    details = entry.details
    usage = details.get("usage", {}) if entry.kind is Kind.CHARGE else {}
    return {
        "kind": entry.kind.value,
        "amount": format_units(-entry.amount),
        "currency": entry.currency,
        **{name: usage.get(name, 0) for name in CLASSES},
        **{name: details[name] for name in SHOWN if details.get(name)},
        **{f"tag_{name}": value for name, value in details.get("tags", {}).items()},
        "hash": entry.hash.hex(),
    }
