"""Usage by period, over a span of days, in a time zone, split by model, project or key. Read-only.

In UTC the rollups are read, some rows a day. In another zone days begin elsewhere, so the charges
themselves are read, in bounded memory: about 100,000 of them a second.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from enum import StrEnum
from typing import Any

from billing import store_reports
from billing.entries import Entry, Kind
from billing.errors import UnknownTenant
from billing.rollups import DAY_NS, Row
from billing.statements import Period
from billing.store import LedgerStore
from billing.usage import CLASSES

_EPOCH = date(1970, 1, 1)


class Split(StrEnum):
    """What a period's sums are split by."""

    MODEL = "model"
    PROJECT = "project"
    KEY = "key"


class Unit(StrEnum):
    """How long a period is."""

    DAY = "day"
    MONTH = "month"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which charges: of one tenant or all, on the days `since` to `until`, both included."""

    tenant: str | None = None
    since: date | None = None
    until: date | None = None
    zone: tzinfo = UTC
    split: Split | None = None

    def bounds_ns(self) -> tuple[int, int]:
        """The span in Unix nanoseconds; the end is not in it."""
        first, end = 0, 2**63 - 1
        if self.since is not None:
            first = _midnight_ns(self.since, self.zone)
        if self.until is not None:
            end = _midnight_ns(self.until + timedelta(days=1), self.zone)
        return first, end


def report(store: LedgerStore, query: Query, unit: Unit) -> list[Period]:
    """One period for each tenant, day or month, and part; by tenant and time. Raises UnknownTenant.

    `Period.part` is the model, project or key where the query splits by one.
    """
    with store.reading() as connection:
        currencies = {n: a.currency for n, a in store_reports.all_accounts(connection).items()}
    if query.tenant is not None and query.tenant not in currencies:
        raise UnknownTenant(f"tenant {query.tenant!r} does not exist; see `cachesvc tenants list`")
    form = "%Y-%m-%d" if unit is Unit.DAY else "%Y-%m"
    periods: dict[tuple[str, str, str], Period] = {}
    for day, row in _rows(store, query):
        name = day.strftime(form)
        part = _part(query.split, row)
        key = (row["tenant"], name, part)
        period = periods.get(key)
        if period is None:
            period = periods[key] = Period(
                row["tenant"], name, currencies[row["tenant"]], part=part
            )
        period.add(row)
    return [periods[key] for key in sorted(periods)]


def _rows(store: LedgerStore, query: Query) -> Iterator[tuple[date, Row]]:
    return _from_rollups(store, query) if query.zone is UTC else _from_entries(store, query)


def _from_rollups(store: LedgerStore, query: Query) -> Iterator[tuple[date, Row]]:
    first = (query.since - _EPOCH).days if query.since else 0
    end = (query.until - _EPOCH).days + 1 if query.until else 2**31 - 1
    with store.reading() as connection:
        rows = store_reports.daily(connection, query.tenant, first, end)
    for row in rows:
        yield _EPOCH + timedelta(days=row["day"]), row


def _from_entries(store: LedgerStore, query: Query) -> Iterator[tuple[date, Row]]:
    """Charges as rows of one. A zone is at most a day off UTC."""
    since_ns = ((query.since - _EPOCH).days - 1) * DAY_NS if query.since else 0
    with store.reading() as connection:
        for entry in store_reports.stream_entries(
            connection, query.tenant, since_ns=max(0, since_ns)
        ):
            if entry.kind is not Kind.CHARGE:
                continue
            day = datetime.fromtimestamp(entry.at_ns // 10**9, query.zone).date()
            early = query.since is not None and day < query.since
            late = query.until is not None and day > query.until
            if not early and not late:
                yield day, _row(entry)


def _midnight_ns(day: date, zone: tzinfo) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()) * 10**9


def _row(entry: Entry) -> Row:
    details: dict[str, Any] = entry.details
    used = details.get("usage", {})
    return {
        "tenant": entry.tenant,
        "model": details["model"],
        "project": details.get("project", ""),
        "key_id": details.get("key", ""),
        "requests": 1,
        **{name: used.get(name, 0) for name in CLASSES},
        "amount": -entry.amount,
        "saved": int(details["saved"]),
    }


def _part(split: Split | None, row: Row) -> str:
    if split is None:
        return ""
    column = {Split.MODEL: "model", Split.PROJECT: "project", Split.KEY: "key_id"}[split]
    return row[column] or "-"
