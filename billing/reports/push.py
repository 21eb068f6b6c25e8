"""Entries as CloudEvents over HTTP, and what a receiver has of them: for OpenMeter and its like.

The chains are the outbox and an export's position is how far it was emptied, so what a receiver did
not take comes again, with the ids that it had. Called off the event loop, by one thread.
"""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from billing.errors import ExportError
from billing.gate.entries import Entry
from billing.reports.export import cloud_event, entry_id
from billing.store import reports as store_reports
from billing.store.store import LedgerStore

BATCH = 100  # events a request
TIMEOUT_S = 30
TRIES = 4
FIRST_WAIT_S = 0.5
SHOWN = 20  # ids of each kind in a report
PASSING = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Receiver:
    """Who takes batches of CloudEvents at a URL; `token` is sent as a bearer token."""

    url: str
    token: str = ""

    def take(self, entries: Iterable[Entry], source: str) -> None:
        """Returns once all of them were taken. Raises `ExportError`."""
        for batch in _batches(entries):
            data = orjson.dumps([cloud_event(entry, source) for entry in batch])
            self._post(data)

    def _post(self, data: bytes) -> None:
        wait_s = FIRST_WAIT_S
        for left in reversed(range(TRIES)):
            try:
                self._ask(data)
                return
            except (OSError, http.client.HTTPException) as error:
                passing = getattr(error, "code", 503) in PASSING
                if not left or not passing:
                    raise ExportError(
                        f"{self.url} did not take the events: {_said(error)}; they are sent again "
                        "by the next export"
                    ) from error
            time.sleep(wait_s)
            wait_s *= 2

    def _ask(self, data: bytes | None) -> bytes:
        headers = {"accept": "application/json"}
        if data is not None:
            headers["content-type"] = "application/cloudevents-batch+json"
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(self.url, data, headers)  # noqa: S310  http(s) only
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            body: bytes = answer.read()
        return body

    def read(self) -> bytes:
        """What it answers to a GET. Raises `ExportError`."""
        try:
            return self._ask(None)
        except (OSError, http.client.HTTPException) as error:
            raise ExportError(f"{self.url} cannot be read: {_said(error)}") from error


def _batches(entries: Iterable[Entry]) -> Iterator[tuple[Entry, ...]]:
    left = iter(entries)
    while batch := tuple(islice(left, BATCH)):
        yield batch


def _said(error: Exception) -> str:
    """The receiver's own words, where it has any."""
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.code} {error.read(200).decode(errors='replace').strip()}".strip()
    return str(error) or type(error).__name__


@dataclass(slots=True)
class Reconciliation:
    """The events that were sent against those that a receiver has."""

    sent: int = 0
    found: int = 0
    repeated: int = 0  # harmless where the receiver drops what it has
    missing: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.missing or self.differing or self.unknown)

    def as_json(self) -> dict[str, Any]:
        named = {"missing": self.missing, "differing": self.differing, "unknown": self.unknown}
        counts = {"ok": self.ok, "sent": self.sent, "found": self.found, "repeated": self.repeated}
        return {
            **counts,
            **{name: len(ids) for name, ids in named.items()},
            "ids": {name: ids[:SHOWN] for name, ids in named.items() if ids},
        }


def reconcile(store: LedgerStore, name: str, source: str, events: Iterable[Any]) -> Reconciliation:
    """Compare what the export `name` sent with `events`, in any order. Raises `ExportError`."""
    report, has = Reconciliation(), dict[str, str]()
    for event in events:
        try:
            event = event.get("event", event)  # OpenMeter wraps each in what it knows of it
            if event["source"] != source:
                continue
            key, digest = str(event["id"]), str(event["data"]["hash"])
        except (AttributeError, KeyError, TypeError) as error:
            raise ExportError(f"the receiver told of something that is no event: {error}") from None
        report.found += 1
        report.repeated += has.get(key) == digest
        if has.setdefault(key, digest) != digest:
            report.differing.append(key)
    with store.reading() as connection:
        for tenant, last in sorted(store_reports.cursors(connection, name).items()):
            for entry in store_reports.stream_entries(connection, tenant, until=last):
                report.sent += 1
                _compare(report, entry, has.pop(entry_id(entry), None))
    report.unknown = sorted(has)
    return report


def _compare(report: Reconciliation, entry: Entry, digest: str | None) -> None:
    if digest is None:
        report.missing.append(entry_id(entry))
    elif digest != entry.hash.hex():
        report.differing.append(entry_id(entry))


def read_events(where: str, token: str = "") -> list[Any]:
    """The events that a receiver has: a JSON list, or a document a line, at a URL or in a file.

    Raises `ExportError`.
    """
    is_url = where.startswith(("http://", "https://"))
    try:
        data = Receiver(where, token).read() if is_url else Path(where).read_bytes()
        found = _documents(data)
    except (OSError, ValueError) as error:
        raise ExportError(f"{where} holds no events: {error}") from error
    return found


def _documents(data: bytes) -> list[Any]:
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return [orjson.loads(line) for line in data.splitlines() if line.strip()]
    if isinstance(found, dict):
        found = next((value for value in found.values() if isinstance(value, list)), [found])
    return list(found)
