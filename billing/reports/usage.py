"""Usage by period: over a span of days, in a time zone, with an optional split. Read-only.

Rollups are by UTC day. A UTC day within one period and the span is read from them, in a few rows. A
UTC day cut by a border, as every day is by midnights of another zone, is read from its charges, at
about 70,000 a second. So are all days if usage is split by session, user or tag, which only
requests contain.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, tzinfo
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from billing.errors import InvalidSpan, UnknownTenant
from billing.gate.rollups import DAY_NS, Rollups, Row, charge_row
from billing.money import format_units
from billing.prices.book import NS
from billing.prices.time_zones import find_zone
from billing.reports.attribution import NOBODY, OF_ROLLUPS, OTHERS, HeavyParts, check_split, part_of
from billing.usage import CLASSES, HIT_CLASSES

if TYPE_CHECKING:  # commands that call a server need no database
    from billing.store.store import Connection, LedgerStore

FIRST_DAY, LAST_DAY = date(1970, 1, 1), date(2261, 12, 31)  # of instants that the ledger can store
_COUNTED = {"storage_token_hours", "storage_token_minutes"}  # not tokens


class Unit(StrEnum):
    """The length of a period."""

    DAY = "day"
    MONTH = "month"
    ALL = "all"


_NAMES = {Unit.DAY: "%Y-%m-%d", Unit.MONTH: "%Y-%m", Unit.ALL: "all"}


@dataclass(slots=True)
class Period:
    """Sums over the charges of one tenant in one period (`2026-11-21`, `2026-11` or a session)."""

    tenant: str
    period: str
    currency: str
    requests: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))
    amount: int = 0
    saved: int = 0
    fees: int = 0
    part: str = ""  # the model, key, user ..., if periods are split

    def add(self, row: Row) -> None:
        self.requests += row["requests"]
        self.amount += row["amount"]
        self.saved += row["saved"]
        self.fees += row["fees"]
        for name in CLASSES:
            self.tokens[name] += row[name]

    @property
    def hit(self) -> int:
        return sum(self.tokens[name] for name in HIT_CLASSES)

    @property
    def prompt(self) -> int:
        return self.hit + self.tokens["miss"]

    def as_json(self) -> dict[str, Any]:
        split = {"part": self.part} if self.part else {}
        return {
            "tenant": self.tenant,
            "period": self.period,
            **split,
            "currency": self.currency,
            "requests": self.requests,
            "prompt_tokens": self.prompt,
            "hit_tokens": self.hit,
            **{
                f"{name}_tokens" if name not in _COUNTED else name: n
                for name, n in self.tokens.items()
            },
            "amount": format_units(self.amount),
            "saved": format_units(self.saved),
            "fees": format_units(self.fees),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Selects charges: of one tenant or all, from day `since` to `until`, both inclusive."""

    tenant: str | None = None
    since: date | None = None
    until: date | None = None
    zone: tzinfo = UTC
    split: str | None = None  # one of `attribution.SPLITS`

    def bounds_ns(self) -> tuple[int, int]:
        """The span in Unix nanoseconds; the end is exclusive."""
        first = 0 if self.since is None else midnight_ns(self.since, self.zone)
        end = 2**63 - 1
        if self.until is not None:
            end = midnight_ns(self.until + timedelta(days=1), self.zone)
        return first, end


def parse_query(
    *,
    tenant: str | None = None,
    since: str | None = None,
    until: str | None = None,
    zone: tzinfo | str = UTC,
    split: str | None = None,
) -> Query:
    """Parses a query. Days are like 2026-11-01, today, yesterday, or 7d for a week back.

    Raises `InvalidSpan`, and `InvalidName` for an unknown zone or split.
    """
    split = None if split is None else check_split(split)
    zone = find_zone(zone) if isinstance(zone, str) else zone
    today = datetime.now(zone).date()
    first = _day(since, today) if since else None
    last = _day(until, today) if until else None
    if first and last and last < first:
        raise InvalidSpan(f"the last day {last} is before the first, {first}")
    return Query(tenant=tenant, since=first, until=last, zone=zone, split=split)


def _day(text: str, today: date) -> date:
    back = {"today": 0, "yesterday": 1}.get(text)
    if back is None and text.endswith("d") and text[:-1].isdecimal():
        back = min(int(text[:6].rstrip("d")), (today - FIRST_DAY).days)
    if back is not None:
        return today - timedelta(days=back)
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise InvalidSpan(
            f"{text!r} is not a day; write it like 2026-11-01, today, yesterday or 7d"
        ) from None
    if not FIRST_DAY <= day <= LAST_DAY:
        raise InvalidSpan(f"{day} is not between {FIRST_DAY} and {LAST_DAY}")
    return day


def midnight_ns(day: date, zone: tzinfo) -> int:
    """The instant at which a day begins."""
    return int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()) * NS


def report(store: "LedgerStore", query: Query, unit: Unit) -> list[Period]:
    """One period per tenant, day or month, and part; by tenant and time. Raises UnknownTenant.

    If the query splits, `Period.part` is the model, project, key, session, user or tag value. The
    number of sessions, users and tags is unbounded, so only each tenant's most expensive ones are
    listed. The rest is one part, `attribution.OTHERS`.
    """
    with store.reading() as connection:
        return report_of(connection, query, unit)


def report_of(connection: "Connection", query: Query, unit: Unit) -> list[Period]:
    """The report within a transaction."""
    currencies = _currencies(connection, query.tenant)
    if query.split is None or query.split in OF_ROLLUPS:
        column = OF_ROLLUPS.get(query.split or "", "")
        parts = (
            (row["tenant"], name, (row[column] or NOBODY) if column else "", row)
            for name, row in charged(connection, query, unit)
        )
        return _summed(parts, currencies)
    tenants = [query.tenant] if query.tenant else sorted(currencies)
    return [
        period
        for tenant in tenants
        for period in _summed(_by_request(connection, tenant, query, unit), currencies)
    ]


_Part = tuple[str, str, str, Row]  # tenant, period, part


def _summed(parts: Iterable[_Part], currencies: Mapping[str, str]) -> list[Period]:
    periods: dict[tuple[str, str, str], Period] = {}
    for tenant, name, part, row in parts:
        key = (tenant, name, part)
        if key not in periods:
            periods[key] = Period(tenant, name, currencies[tenant], part=part)
        periods[key].add(row)
    return [periods[key] for key in sorted(periods)]


def _by_request(connection: "Connection", tenant: str, query: Query, unit: Unit) -> Iterator[_Part]:
    """A tenant's charges, each with its part or `OTHERS`. Reads them twice."""
    from billing.store import reports as store_reports

    split, span = query.split or "", query.bounds_ns()
    heavy = HeavyParts()
    for entry in store_reports.charges_between(connection, tenant, *span):
        heavy.add(part_of(split, entry), -entry.amount)
    listed = heavy.dearest()
    for entry in store_reports.charges_between(connection, tenant, *span):
        part = part_of(split, entry)
        name = _period_name(unit, query.zone, entry.moment_ns)
        yield tenant, name, part if part in listed else OTHERS, charge_row(entry)


def total(store: "LedgerStore", tenant: str | None = None) -> list[Period]:
    """One period per tenant, over all time."""
    return report(store, Query(tenant=tenant), Unit.ALL)


def by_session(store: "LedgerStore", query: Query, *, limit: int = 100) -> list[Period]:
    """One period per named session last used within the span, latest first."""
    from billing.store import reports as store_reports

    with store.reading() as connection:
        currencies = _currencies(connection, query.tenant)
        rows = store_reports.sessions(connection, query.tenant, limit, *query.bounds_ns())
    periods = []
    for row in rows:
        period = Period(row["tenant"], row["session"], currencies[row["tenant"]])
        period.add(row)
        periods.append(period)
    return periods


def charged(connection: "Connection", query: Query, unit: Unit) -> Iterator[tuple[str, Row]]:
    """Rollup rows (see `billing.gate.rollups`), each with the name of its period, in any order."""
    from billing.store import reports as store_reports

    name_of = partial(_period_name, unit, query.zone)
    from_ns, to_ns = query.bounds_ns()
    cut: set[tuple[str, int]] = set()
    for row in store_reports.daily(
        connection, query.tenant, from_ns // DAY_NS, (to_ns - 1) // DAY_NS + 1
    ):
        begin_ns, end_ns = row["day"] * DAY_NS, (row["day"] + 1) * DAY_NS
        is_within = from_ns <= begin_ns and end_ns <= to_ns
        if is_within and name_of(begin_ns) == name_of(end_ns - 1):
            yield name_of(begin_ns), row
        else:
            cut.add((row["tenant"], begin_ns))
    for tenant, begin_ns in sorted(cut):
        span = max(begin_ns, from_ns), min(begin_ns + DAY_NS, to_ns)
        sums: dict[str, Rollups] = {}
        for entry in store_reports.charges_between(connection, tenant, *span):
            sums.setdefault(name_of(entry.moment_ns), Rollups()).add(entry, entry.details)
        for name, rollups in sums.items():
            yield from ((name, row) for row in rollups.rows()[0])


def _period_name(unit: Unit, zone: tzinfo, at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns // NS, zone).strftime(_NAMES[unit])


def _currencies(connection: "Connection", tenant: str | None) -> dict[str, str]:
    from billing.store import reports as store_reports

    found = {n: a.currency for n, a in store_reports.all_accounts(connection).items()}
    if tenant is not None and tenant not in found:
        raise UnknownTenant(f"tenant {tenant!r} does not exist; see `cachesvc tenants show`")
    return found
