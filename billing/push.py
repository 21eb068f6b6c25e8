"""Usage events for a metering service: CloudEvents 1.0 over HTTP, one for each token class.

The tenants' chains are the outbox. An export sends what is after its position and moves on once the
service has accepted it, so nothing is skipped. Ids are stable, and the service drops repeated ones.
What it refuses stops the export. Called off the event loop, by one thread; blocks.
"""

import time
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from billing import outgoing
from billing.errors import ExportError, ReceiverError
from billing.gate.entries import Entry, Kind
from billing.gate.holds import rate_ref
from billing.money import format_units, rate_per_million
from billing.prices.book import NS, PriceBook
from billing.prices.rating import charge_in
from billing.reports.export import drain, entry_id
from billing.store.store import LedgerStore

TYPE = "cachesvc.usage.v1"
BATCH = 100  # events in a call, as many as OpenMeter takes
SILENCE_S = 30.0
WHOLE_S = 300.0  # of a call
TRIES = 4
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
MOST_BYTES = 1 << 16  # of an answer
PASSING = (408, 409, 425, 429, 500, 502, 503, 504)
LABELS = ("model", "card", "version", "window", "project", "key", "session", "user", "tags")


def push(store: LedgerStore, book: PriceBook, name: str, url: str, token: str, source: str) -> int:
    """Sends the entries after the position of the export `name`. Returns their number.

    Raises `ExportError`. What was accepted until then is not sent again.
    """

    def sink(entries: list[Entry]) -> None:
        events = [event for entry in entries for event in usage_events(entry, book, source)]
        for start in range(0, len(events), BATCH):
            _post(url, token, events[start : start + BATCH])

    return drain(store, name, sink)


def usage_events(entry: Entry, book: PriceBook, source: str) -> Iterator[dict[str, Any]]:
    """The events of an entry. Their amounts are what the tenant was charged.

    A charge has one for each class and fee. A correction has one, with an amount and no tokens.
    Deposits are no usage and have none.
    """
    if entry.kind is Kind.CHARGE:
        charge = charge_in(entry.details, book.pinned(rate_ref(entry.details)))
        for line in charge.lines:
            price = rate_per_million(line.per_token)
            yield _event(entry, source, line.name, line.tokens, line.amount, price)
    elif entry.kind is Kind.CORRECTION:
        yield _event(entry, source, entry.kind.value, 0, -entry.amount, "")


def _event(
    entry: Entry, source: str, name: str, tokens: int, amount: int, price: str
) -> dict[str, Any]:
    details = entry.details
    return {
        "specversion": "1.0",
        "id": f"{entry_id(entry)}/{name}",
        "source": source,
        "type": TYPE,
        "time": datetime.fromtimestamp(entry.moment_ns // NS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "subject": entry.tenant,
        "datacontenttype": "application/json",
        "data": {
            "class": name,
            "tokens": tokens,
            "amount": format_units(amount),
            "currency": entry.currency,
            **({"per_million": price} if price else {}),
            "request_id": entry.request_id,
            **{label: details[label] for label in LABELS if details.get(label)},
            "hash": entry.hash.hex(),
        },
    }


def _post(url: str, token: str, events: Sequence[dict[str, Any]]) -> None:
    """Posts a batch, and repeats it after a passing failure. Raises `ExportError`."""
    headers = {"content-type": "application/cloudevents-batch+json"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    wait_s, said = FIRST_WAIT_S, ""
    for tries in range(1, TRIES + 1):
        request = urllib.request.Request(url, orjson.dumps(events), headers)  # noqa: S310  http(s) only
        try:
            reply = outgoing.ask(
                request, silence_s=SILENCE_S, timeout_s=WHOLE_S, most_bytes=MOST_BYTES
            )
        except ReceiverError as error:
            said = str(error)
        else:
            if not reply.refusal:
                return
            said = reply.refusal
            if reply.status not in PASSING:
                words = reply.body[: outgoing.LONGEST_REASON].decode(errors="replace").strip()
                said = said if reply.redirects else f"{said} {words}".strip()
                break
            after = reply.headers.get("retry-after", "")
            wait_s = max(wait_s, min(float(after), LONGEST_WAIT_S) if after.isdecimal() else 0.0)
        if tries < TRIES:
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    raise ExportError(
        f"{url} did not take the events from {events[0]['id']} to {events[-1]['id']}: {said}; "
        "the next export sends them again"
    )
