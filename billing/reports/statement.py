"""A tenant's month as a statement: JSON or CSV. Read-only.

It reads the rollups and the few entries that are not charges. In a zone other than UTC it also
reads the charges of the two UTC days cut by the month's ends. A statement over a million charges
reads about a hundred rows. Lines are rounded half-even to the currency's places, and the rounding
difference is shown, so every column sums exactly.
"""

import io
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Any

from billing.errors import InvalidSpan, UnknownTenant
from billing.gate.entries import Entry, Kind
from billing.gate.rollups import Row
from billing.gate.work import TenantAccount
from billing.money import format_units, minor_places, rate_per_million, round_half_even
from billing.prices.book import PriceBook, RateRef
from billing.prices.cards import applied_card
from billing.prices.time_zones import zone_name
from billing.reports.attribution import check_split
from billing.reports.csv import safe_writer
from billing.reports.usage import FIRST_DAY, LAST_DAY, Period, Query, Unit, charged, report_of
from billing.store import accounts as store_accounts
from billing.store import reports as store_reports
from billing.store.store import Connection, LedgerStore
from billing.usage import RELATIVE


@dataclass(frozen=True, slots=True)
class StatementLine:
    """One class of tokens of one model at one rate. `rounded` is what is printed."""

    model: str
    card: str
    version: str
    window: str
    name: str
    tokens: int
    rate: str  # per million tokens
    amount: int
    rounded: int


@dataclass(frozen=True, slots=True)
class Movement:
    """A deposit, grant or correction within the month."""

    at: str
    kind: str
    reference: str
    amount: int
    reason: str


@dataclass(frozen=True, slots=True)
class Statement:
    """A tenant's month.

    `total`, the amount due, is the sum of the rounded lines, `residue` and `rounding`, less
    `corrected`. `exact` is the sum of the exact lines.
    """

    tenant: str
    month: str
    zone: str
    is_over: bool  # whether the month has ended, so that no charges follow
    currency: str
    places: int
    lines: tuple[StatementLine, ...]
    movements: tuple[Movement, ...]
    requests: int
    exact: int
    saved: int
    corrected: int
    opening: int
    breakdown: str = ""
    parts: tuple[Period, ...] = ()  # the parts of `exact` by attribution

    @property
    def rounded(self) -> int:
        return sum(line.rounded for line in self.lines)

    @property
    def residue(self) -> int:
        return self.exact - self.rounded

    @property
    def total(self) -> int:
        return round_half_even(self.exact - self.corrected, self.places)

    @property
    def rounding(self) -> int:
        return self.total - (self.exact - self.corrected)

    @property
    def closing(self) -> int:
        return self.opening + sum(movement.amount for movement in self.movements) - self.exact

    def printed(self, units: int) -> str:
        return format_units(units, self.places)


def statement(
    store: LedgerStore,
    tenant: str,
    month: str,
    zone: tzinfo = UTC,
    breakdown: str | None = None,
) -> Statement:
    """The statement of a month such as "2026-11", from the first midnight to the last in `zone`.

    Raises `UnknownTenant`, `InvalidSpan`, or `InvalidName` for an unknown breakdown.
    """
    span = month_days(month)
    split = None if breakdown is None else check_split(breakdown)
    with store.reading() as connection:
        account = store_reports.all_accounts(connection).get(tenant)
        if account is None:
            raise UnknownTenant(f"tenant {tenant!r} does not exist; see `cachesvc tenants show`")
        made = statement_of(connection, account, span, zone)
        if split is None:
            return made
        query = Query(tenant=tenant, since=span[0], until=span[1], zone=zone, split=split)
        parts = tuple(report_of(connection, query, Unit.ALL))
        return replace(made, breakdown=split, parts=parts)


def statement_of(
    connection: Connection, account: TenantAccount, span: tuple[date, date], zone: tzinfo
) -> Statement:
    """The statement within a transaction, for the month from the first to the last day of
    `span`."""
    (first, last), tenant = span, account.tenant
    query = Query(tenant=tenant, since=first, until=last, zone=zone)
    earlier = Query(tenant=tenant, until=first - timedelta(days=1), zone=zone)
    from_ns, to_ns = query.bounds_ns()
    book = PriceBook(tuple(map(applied_card, store_accounts.card_rows(connection))))
    before = sum(row["amount"] for _, row in charged(connection, earlier, Unit.ALL))
    rows = [row for _, row in charged(connection, query, Unit.ALL)]
    rare = store_reports.rare_entries(connection, tenant, 0, to_ns)
    places = minor_places(account.currency)
    now = [entry for entry in rare if entry.moment_ns >= from_ns]
    return Statement(
        tenant=tenant,
        month=first.strftime("%Y-%m"),
        zone=zone_name(zone),
        is_over=to_ns <= time.time_ns(),
        currency=account.currency,
        places=places,
        lines=_lines(rows, book, places),
        movements=tuple(_movement(entry, zone) for entry in now),
        requests=sum(row["requests"] for row in rows),
        exact=sum(row["amount"] for row in rows),
        saved=sum(row["saved"] for row in rows),
        corrected=sum(entry.amount for entry in now if entry.kind is Kind.CORRECTION),
        opening=sum(entry.amount for entry in rare if entry.moment_ns < from_ns) - before,
    )


def month_days(month: str) -> tuple[date, date]:
    """The first and the last day of a month."""
    try:
        first = datetime.strptime(month, "%Y-%m").replace(tzinfo=UTC).date()
    except ValueError:
        raise InvalidSpan(f"{month!r} is not a month such as 2026-11") from None
    if not FIRST_DAY <= first <= LAST_DAY:
        raise InvalidSpan(f"{month!r} is not between {FIRST_DAY:%Y-%m} and {LAST_DAY:%Y-%m}")
    return first, (first + timedelta(days=31)).replace(day=1) - timedelta(days=1)


def _lines(rows: Sequence[Row], book: PriceBook, places: int) -> tuple[StatementLine, ...]:
    groups: dict[RateRef, Period] = {}
    for row in rows:
        ref = RateRef(row["card"], row["version"], row["model"], row["window_name"])
        groups.setdefault(ref, Period(row["tenant"], "", "")).add(row)
    lines: list[StatementLine] = []
    for ref in sorted(groups):
        lines += _group_lines(ref, groups[ref], book, places)
    return tuple(lines)


def _group_lines(
    ref: RateRef, sums: Period, book: PriceBook, places: int
) -> Iterable[StatementLine]:
    rates = book.pinned(ref).rates
    left = sums.amount - sums.fees
    for name, tokens in sums.tokens.items():
        per_token = rates.of(name)
        amount = tokens * per_token
        left -= amount
        if tokens and (amount or name not in RELATIVE):
            rate, rounded = rate_per_million(per_token), round_half_even(amount, places)
            yield _line(ref, name, tokens, rate, amount, rounded)
    if sums.fees:
        yield _line(ref, "fees", 0, "", sums.fees, round_half_even(sums.fees, places))
    if left:
        yield _line(ref, "minimum_cached", 0, "", left, round_half_even(left, places))


def _line(ref: RateRef, *rest: Any) -> StatementLine:
    return StatementLine(ref.model, ref.card, ref.version, ref.window, *rest)


def _movement(entry: Entry, zone: tzinfo) -> Movement:
    at = datetime.fromtimestamp(entry.moment_ns // 10**9, zone).isoformat()
    reason = entry.details.get("reason", "")
    return Movement(at, entry.kind.value, entry.request_id, entry.amount, reason)


def statement_json(statement: Statement) -> dict[str, Any]:
    """The statement as JSON values. Amounts are decimal texts."""
    return {
        "tenant": statement.tenant,
        "month": statement.month,
        "timezone": statement.zone,
        "is_over": statement.is_over,
        "currency": statement.currency,
        "requests": statement.requests,
        "lines": [
            {
                "model": line.model,
                "rate_card": f"{line.card} {line.version}",
                "window": line.window,
                "class": line.name,
                "tokens": line.tokens,
                "per_million": line.rate,
                "amount": format_units(line.amount),
                "rounded": statement.printed(line.rounded),
            }
            for line in statement.lines
        ],
        "movements": [
            asdict(movement) | {"amount": format_units(movement.amount)}
            for movement in statement.movements
        ],
        "exact": format_units(statement.exact),
        "corrected": format_units(statement.corrected),
        "residue": format_units(statement.residue),
        "rounding": format_units(statement.rounding),
        "total": statement.printed(statement.total),
        "saved_against_no_cache": format_units(statement.saved),
        "opening_balance": format_units(statement.opening),
        "closing_balance": format_units(statement.closing),
        **({"parts": [_part(part) for part in statement.parts]} if statement.breakdown else {}),
    }


PART_COLUMNS = ("requests", "prompt_tokens", "hit_tokens", "output_tokens", "fees", "saved")


def _part(part: Period) -> dict[str, Any]:
    fields = part.as_json()
    names = ("part", *PART_COLUMNS, "amount")
    return {name: fields.get(name, "") for name in names}


CSV_COLUMNS = (
    *("tenant", "month", "timezone", "currency", "model", "rate_card", "window", "class"),
    *("tokens", "per_million", "amount", "rounded"),
)


def statement_csv(statement: Statement) -> str:
    """The statement as CSV. The `amount` column sums to the exact total, including corrections.

    `rounded`, with the rows of rounding differences, sums to the total. With a breakdown there is
    one row per part instead, and `amount` sums to the charges.
    """
    out = io.StringIO()
    write = safe_writer(out)
    if statement.breakdown:
        whole = (statement.tenant, statement.month, statement.zone, statement.currency)
        write((*CSV_COLUMNS[:4], statement.breakdown, *PART_COLUMNS, "amount"))
        for part in statement.parts:
            write((*whole, *_part(part).values()))
        return out.getvalue()
    write(CSV_COLUMNS)
    head = (statement.tenant, statement.month, statement.zone, statement.currency)
    for line in statement.lines:
        card = f"{line.card} {line.version}"
        what = (line.model, card, line.window, line.name, line.tokens, line.rate)
        write((*head, *what, format_units(line.amount), statement.printed(line.rounded)))
    rest = {
        "residue": ("", format_units(statement.residue)),
        "corrections": (format_units(-statement.corrected), format_units(-statement.corrected)),
        "rounding": ("", format_units(statement.rounding)),
    }
    for name, amounts in rest.items():
        write((*head, "", "", "", name, "", "", *amounts))
    return out.getvalue()
