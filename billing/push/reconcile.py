"""Compares what was sent with a metering service's data.

CloudEvents and Lago return single events, compared by id and hash. Stripe returns sums, compared by
customer and day.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson

from billing.errors import ExportError
from billing.gate.entries import Entry
from billing.push import post
from billing.push.events import Format, HttpAnswer, HttpCall
from billing.push.lago import LagoEvents
from billing.push.stripe import StripeMeters
from billing.reports.export import entry_id
from billing.store import push as rows
from billing.store import reports as store_reports
from billing.store.store import LedgerStore

SHOWN = 20  # ids of each kind in a report
DAY_S = 86_400
NEAR = Decimal("1e-9")  # tolerance for a sum that Stripe returns as a float


@dataclass(slots=True)
class Reconciliation:
    """Counts of compared events, or of days if the service returns sums."""

    sent: int = 0
    found: int = 0
    repeated: int = 0  # harmless if the service drops repeated ids
    refused: int = 0  # stored, and retried by the next export
    missing: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.missing or self.differing or self.unknown or self.refused)

    def as_json(self) -> dict[str, Any]:
        named = {"missing": self.missing, "differing": self.differing, "unknown": self.unknown}
        counts = {"ok": self.ok, "sent": self.sent, "found": self.found, "repeated": self.repeated}
        return {
            **counts,
            "refused": self.refused,
            **{name: len(ids) for name, ids in named.items()},
            "ids": {name: ids[:SHOWN] for name, ids in named.items() if ids},
        }


def reconcile(
    store: LedgerStore,
    name: str,
    source: str,
    events: Iterable[Any],
    tells: Callable[[Entry], bool] = lambda _: True,
) -> Reconciliation:
    """Compares the entries sent by export `name` with `events`, in any order. Raises `ExportError`.

    `tells` selects the entries that the service gets.
    """
    report, has = Reconciliation(), dict[str, str]()
    for event in events:
        known = _known(event, source)
        if known is None:
            continue
        key, digest = known
        report.found += 1
        report.repeated += has.get(key) == digest
        if has.setdefault(key, digest) != digest:
            report.differing.append(key)
    for entry in sent_entries(store, name):
        if tells(entry):
            report.sent += 1
            _compare(report, entry, has.pop(entry_id(entry), None))
    report.unknown = sorted(has)
    report.refused = _num_refused(store, name)
    return report


def sent_entries(store: LedgerStore, name: str) -> Iterator[Entry]:
    """The entries before the position of export `name`."""
    with store.reading() as connection:
        for tenant, last in sorted(store_reports.cursors(connection, name).items()):
            yield from store_reports.stream_entries(connection, tenant, until=last)


def _num_refused(store: LedgerStore, name: str) -> int:
    with store.reading() as connection:
        return rows.num_refused(connection, name)


def _known(event: Any, source: str) -> tuple[str, str] | None:
    """An entry's id and hash in a service's event; None for another ledger's event."""
    try:
        if "transaction_id" in event:
            mine, _, key = str(event["transaction_id"]).partition("/")
            return (key, str(event["properties"]["hash"])) if mine == source else None
        event = event.get("event", event)  # OpenMeter wraps events in its own data
        if event["source"] != source:
            return None
        return str(event["id"]), str(event["data"]["hash"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ExportError(
            f"the receiver's list has an item that is not an event: {error}"
        ) from None


def _compare(report: Reconciliation, entry: Entry, digest: str | None) -> None:
    if digest is None:
        report.missing.append(entry_id(entry))
    elif digest != entry.hash.hex():
        report.differing.append(entry_id(entry))


Day = tuple[str, str, int]  # customer, event name of the meter, the day's first second


def reconcile_sums(store: LedgerStore, name: str, to: StripeMeters) -> Reconciliation:
    """Compare the sums of each customer, meter and day (UTC). Raises `ExportError`."""
    report, sums = Reconciliation(), defaultdict[Day, Decimal](Decimal)
    for entry in sent_entries(store, name):
        customer = to.customers.get(entry.tenant)
        for meter, _, value in to.values(entry) if customer else ():
            day_s = entry.moment_ns // (DAY_S * 10**9) * DAY_S
            sums[customer or "", meter, day_s] += Decimal(value)
    meters = _stripe_meters(to) if sums else {}
    days: dict[tuple[str, str], list[int]] = defaultdict(list)
    for customer, meter, day_s in sums:
        days[customer, meter].append(day_s)
    for (customer, meter), mine in sorted(days.items()):
        if meter not in meters:
            raise ExportError(f"Stripe has no meter whose event_name is {meter!r}")
        has = _stripe_days(to, meters[meter], customer, min(mine), max(mine) + DAY_S)
        for day_s in sorted({*mine, *has}):
            key = (customer, meter, day_s)
            _compare_day(report, key, sums.get(key), has.get(day_s, Decimal(0)))
    report.refused = _num_refused(store, name)
    return report


def _compare_day(report: Reconciliation, key: Day, sent: Decimal | None, has: Decimal) -> None:
    customer, meter, day_s = key
    day = datetime.fromtimestamp(day_s, UTC)
    label = f"{customer} {meter} {day:%Y-%m-%d}: sent {_plain(sent)}, Stripe has {_plain(has)}"
    report.sent += sent is not None
    report.found += bool(has)
    if sent is None:
        if has:
            report.unknown.append(label)
    elif not has and sent:
        report.missing.append(label)
    elif abs(has - sent) > abs(sent) * NEAR:
        report.differing.append(label)


def _plain(value: Decimal | None) -> str:
    return f"{(value or Decimal(0)).normalize():f}"


def _stripe_meters(to: StripeMeters) -> dict[str, str]:
    """The ids of the meters by event name."""
    found = _stripe_list(to, f"{to.api}/v1/billing/meters", {"status": "active"})
    return {str(each["event_name"]): str(each["id"]) for each in found}


def _stripe_days(
    to: StripeMeters, meter: str, customer: str, from_s: int, to_s: int
) -> dict[int, Decimal]:
    url = f"{to.api}/v1/billing/meters/{meter}/event_summaries"
    asked = {
        "customer": customer,
        "start_time": from_s,
        "end_time": to_s,
        "value_grouping_window": "day",
    }
    found = _stripe_list(to, url, asked)
    return {int(each["start_time"]): Decimal(each["aggregated_value"]) for each in found}


def _stripe_list(
    to: StripeMeters, url: str, asked: Mapping[str, object]
) -> Iterator[dict[str, Any]]:
    """Everything in a list, page by page."""
    last: dict[str, object] = {}
    while True:
        query = urlencode({**asked, "limit": 100, **last})
        answer = post.ask(HttpCall(f"{url}?{query}", None, to.headers()))
        try:
            page = json.loads(answer.body, parse_float=Decimal)
            data = page["data"]
            yield from data
            if not page.get("has_more") or not data:
                return
            last = {"starting_after": data[-1]["id"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ExportError(
                f"{url} answered {answer.said}, which is not a list: {error}"
            ) from None


def lago_events(to: LagoEvents) -> Iterator[Any]:
    """Every event in Lago with the code, page by page."""
    number: int | None = 1
    while number:
        answer = post.ask(to.page(number))
        try:
            page = orjson.loads(answer.body)
            yield from page["events"]
            number = page["meta"]["next_page"]
        except (ValueError, KeyError, TypeError) as error:
            raise ExportError(
                f"Lago answered {answer.said}, which is not a page: {error}"
            ) from None


def read_events(where: str, to: Format | None = None, token: str = "") -> list[Any]:
    """A service's events: a JSON list or JSON lines, from a URL or a file.

    Raises `ExportError`.
    """
    if isinstance(to, LagoEvents):
        return list(lago_events(to))
    is_url = where.startswith(("http://", "https://"))
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        data = (
            _taken(where, post.ask(HttpCall(where, None, headers)))
            if is_url
            else Path(where).read_bytes()
        )
        found = _documents(data)
    except (OSError, ValueError) as error:
        raise ExportError(f"{where} holds no events: {error}") from error
    return found


def _taken(where: str, answer: HttpAnswer) -> bytes:
    if answer.status >= 300:
        raise ExportError(f"{where} cannot be read: {answer.said}")
    return answer.body


def _documents(data: bytes) -> list[Any]:
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return [orjson.loads(line) for line in data.splitlines() if line.strip()]
    if isinstance(found, dict):
        found = next((value for value in found.values() if isinstance(value, list)), [found])
    return list(found)
