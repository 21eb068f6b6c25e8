"""What a tenant used and owes: by day, month and session, and a month's invoice. Read-only.

Everything is read from the rollups and the few entries that are no charge, so a statement over a
million charges reads some hundred rows. Times are UTC. Exact amounts stay exact; an invoice's lines
are rounded half-even to the currency's places and the residue of the rounding is shown.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from billing import store_accounts, store_reports
from billing.cards import parse_card
from billing.entries import Entry, Kind
from billing.errors import BillingError, UnknownTenant
from billing.money import format_units, rate_per_million, round_half_even
from billing.prices import PriceBook, RateRef
from billing.rollups import DAY_NS, Row
from billing.store import LedgerStore
from billing.usage import CLASSES, HIT_CLASSES

_EPOCH = date(1970, 1, 1)
_PLACES = {"JPY": 0, "KRW": 0, "VND": 0, "CLP": 0, "KWD": 3, "BHD": 3, "JOD": 3}
_LABELS = {
    "hit_device": "Prompt, hit in device memory",
    "hit_host": "Prompt, hit in host memory",
    "hit_disk": "Prompt, hit on disk",
    "hit_remote": "Prompt, hit on a remote tier",
    "miss": "Prompt, computed",
    "output": "Output",
    "cache_write": "Written to the cache",
    "storage_token_hours": "Pinned, token-hours",
}


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
    part: str = ""  # the model, project or key, where periods are split by one

    def add(self, row: Row) -> None:
        self.requests += row["requests"]
        self.amount += row["amount"]
        self.saved += row["saved"]
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
            **{f"{name}_tokens" if name in _TOKENS else name: n for name, n in self.tokens.items()},
            "amount": format_units(self.amount),
            "saved": format_units(self.saved),
        }


_TOKENS = {*HIT_CLASSES, "miss", "output", "cache_write"}


def by_day(store: LedgerStore, tenant: str | None = None, *, days: int = 31) -> list[Period]:
    """One period for each tenant and day, of the last `days` days, oldest first."""
    today = (datetime.now(UTC).date() - _EPOCH).days
    return _periods(store, tenant, today - days + 1, lambda day: day.isoformat())


def by_month(store: LedgerStore, tenant: str | None = None) -> list[Period]:
    """One period for each tenant and month, oldest first."""
    return _periods(store, tenant, 0, lambda day: day.strftime("%Y-%m"))


def total(store: LedgerStore, tenant: str | None = None) -> list[Period]:
    """One period for each tenant, of all time."""
    return _periods(store, tenant, 0, lambda day: "all")


def by_session(
    store: LedgerStore,
    tenant: str | None = None,
    *,
    limit: int = 100,
    from_ns: int = 0,
    to_ns: int = 2**63 - 1,
) -> list[Period]:
    """One period for each named session that was used last in a span of time, the latest first."""
    with store.reading() as connection:
        currencies = {n: a.currency for n, a in store_reports.all_accounts(connection).items()}
        rows = store_reports.sessions(connection, tenant, limit, from_ns, to_ns)
    periods = []
    for row in rows:
        period = Period(row["tenant"], row["session"], currencies[row["tenant"]])
        period.add(row)
        periods.append(period)
    return periods


def _periods(store: LedgerStore, tenant: str | None, from_day: int, name_of: Any) -> list[Period]:
    with store.reading() as connection:
        currencies = {n: a.currency for n, a in store_reports.all_accounts(connection).items()}
        rows = store_reports.daily(connection, tenant, from_day)
    if tenant is not None and tenant not in currencies:
        raise UnknownTenant(f"tenant {tenant!r} does not exist; see `cachesvc tenants list`")
    periods: dict[tuple[str, str], Period] = {}
    for row in rows:
        name = name_of(_EPOCH + timedelta(days=row["day"]))
        key = (row["tenant"], name)
        period = periods.setdefault(key, Period(*key, currencies[row["tenant"]]))
        period.add(row)
    return list(periods.values())


@dataclass(frozen=True, slots=True)
class InvoiceLine:
    """One class of tokens of one model at one rate. `rounded` is what is printed."""

    model: str
    card: str
    version: str
    window: str
    name: str
    label: str
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
class Invoice:
    """A tenant's month. `exact` is the sum of the exact lines, `total` what is asked for;
    `residue` is `exact` less the sum of the rounded lines, so that everything adds up in sight."""

    tenant: str
    month: str
    currency: str
    places: int
    lines: tuple[InvoiceLine, ...]
    movements: tuple[Movement, ...]
    requests: int
    exact: int
    total: int
    residue: int
    saved: int
    corrected: int
    opening: int
    closing: int

    def money(self, units: int) -> str:
        return format_units(units)

    def printed(self, units: int) -> str:
        return format_units(units, self.places)


def invoice(store: LedgerStore, tenant: str, month: str) -> Invoice:
    """The invoice of a month such as "2026-11". Raises `UnknownTenant` or `BillingError`."""
    first, after = month_span(month)
    with store.reading() as connection:
        account = store_reports.all_accounts(connection).get(tenant)
        if account is None:
            raise UnknownTenant(f"tenant {tenant!r} does not exist; see `cachesvc tenants list`")
        book = PriceBook(
            tuple(parse_card(row["text"]) for row in store_accounts.card_rows(connection))
        )
        earlier = store_reports.daily(connection, tenant, 0, first)
        rows = store_reports.daily(connection, tenant, first, after)
        rare = store_reports.rare_entries(connection, tenant, 0, after * DAY_NS)
    places = _PLACES.get(account.currency, 2)
    lines = _lines(rows, book, places)
    now = [entry for entry in rare if entry.at_ns >= first * DAY_NS]
    before = [entry for entry in rare if entry.at_ns < first * DAY_NS]
    exact = sum(row["amount"] for row in rows)
    opening = sum(e.amount for e in before) - sum(row["amount"] for row in earlier)
    corrected = sum(entry.amount for entry in now if entry.kind is Kind.CORRECTION)
    return Invoice(
        tenant=tenant,
        month=month,
        currency=account.currency,
        places=places,
        lines=lines,
        movements=tuple(_movement(entry) for entry in now),
        requests=sum(row["requests"] for row in rows),
        exact=exact,
        total=round_half_even(exact - corrected, places),
        residue=exact - sum(line.rounded for line in lines),
        saved=sum(row["saved"] for row in rows),
        corrected=corrected,
        opening=opening,
        closing=opening + sum(entry.amount for entry in now) - exact,
    )


def month_span(month: str) -> tuple[int, int]:
    """First day of a month and of the next, as days since the epoch."""
    try:
        first = datetime.strptime(month, "%Y-%m").replace(tzinfo=UTC).date()
    except ValueError:
        raise BillingError(f"{month!r} is not a month such as 2026-11") from None
    after = (first + timedelta(days=32)).replace(day=1)
    return (first - _EPOCH).days, (after - _EPOCH).days


def _lines(rows: Sequence[Row], book: PriceBook, places: int) -> tuple[InvoiceLine, ...]:
    groups: dict[RateRef, Period] = {}
    for row in rows:
        ref = RateRef(row["card"], row["version"], row["model"], row["window_name"])
        groups.setdefault(ref, Period(row["tenant"], "", "")).add(row)
    lines: list[InvoiceLine] = []
    for ref in sorted(groups):
        lines += _group_lines(ref, groups[ref], book, places)
    return tuple(lines)


def _group_lines(ref: RateRef, sums: Period, book: PriceBook, places: int) -> Iterable[InvoiceLine]:
    rates = book.pinned(ref).rates
    left = sums.amount
    for name, tokens in sums.tokens.items():
        field_name = "storage" if name == "storage_token_hours" else name
        per_token = getattr(rates, field_name) or 0
        amount = tokens * per_token
        left -= amount
        if tokens:
            rate, rounded = rate_per_million(per_token), round_half_even(amount, places)
            yield _line(ref, name, _LABELS[name], tokens, rate, amount, rounded)
    if left:
        label = "Hits below the minimum cached size, at the price of computed tokens"
        rounded = round_half_even(left, places)
        yield _line(ref, "minimum_cached", label, 0, "", left, rounded)


def _line(ref: RateRef, *rest: Any) -> InvoiceLine:
    return InvoiceLine(ref.model, ref.card, ref.version, ref.window, *rest)


def _movement(entry: Entry) -> Movement:
    at = datetime.fromtimestamp(entry.at_ns // 10**9, UTC).isoformat()
    reason = entry.details.get("reason", "")
    return Movement(at, entry.kind.value, entry.request_id, entry.amount, reason)


def invoice_json(invoice: Invoice) -> dict[str, Any]:
    """The invoice as JSON values; every amount a decimal text."""
    money = invoice.money
    return {
        "tenant": invoice.tenant,
        "month": invoice.month,
        "currency": invoice.currency,
        "requests": invoice.requests,
        "lines": [
            {
                "model": line.model,
                "rate_card": f"{line.card} {line.version}",
                "window": line.window,
                "class": line.name,
                "tokens": line.tokens,
                "per_million": line.rate,
                "amount": money(line.amount),
                "rounded": invoice.printed(line.rounded),
            }
            for line in invoice.lines
        ],
        "movements": [
            {
                "at": movement.at,
                "kind": movement.kind,
                "reference": movement.reference,
                "amount": money(movement.amount),
                "reason": movement.reason,
            }
            for movement in invoice.movements
        ],
        "exact": money(invoice.exact),
        "corrected": money(invoice.corrected),
        "residue": money(invoice.residue),
        "total": invoice.printed(invoice.total),
        "saved_against_no_cache": money(invoice.saved),
        "opening_balance": money(invoice.opening),
        "closing_balance": money(invoice.closing),
    }


def invoice_csv(invoice: Invoice) -> str:
    """The invoice's lines as CSV, with the residue as the last line, so that the column adds up."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        (
            *("tenant", "month", "currency", "model", "rate_card", "window", "class", "tokens"),
            *("per_million", "amount", "rounded"),
        )
    )
    head = (invoice.tenant, invoice.month, invoice.currency)
    for line in invoice.lines:
        card = f"{line.card} {line.version}"
        what = (line.model, card, line.window, line.name, line.tokens, line.rate)
        writer.writerow((*head, *what, invoice.money(line.amount), invoice.printed(line.rounded)))
    writer.writerow((*head, "", "", "", "residue", "", "", "", invoice.money(invoice.residue)))
    return out.getvalue()


def invoice_html(invoice: Invoice) -> str:
    """A page to print."""
    environment = Environment(
        loader=PackageLoader("billing"), autoescape=select_autoescape(), trim_blocks=True
    )
    return environment.get_template("invoice.html").render(invoice=invoice)
