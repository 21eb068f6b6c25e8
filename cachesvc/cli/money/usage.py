"""`cachesvc usage`: tokens by class, what they cost and what hits saved; invoices and exports."""

import os
from collections.abc import Callable
from datetime import datetime, tzinfo
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from api.format import number_of, percent
from billing.errors import InvalidName, InvalidSpan
from billing.gate.entries import Entry
from billing.money import format_units
from billing.prices.time_zones import LocalZone, find_zone
from billing.reports import export as exports
from billing.reports import invoice as statements
from billing.reports import usage as usage_report
from billing.reports.usage import Period, Query, Split, Unit, parse_query, report
from cachesvc.cli.money.books import (
    DatabaseUrl,
    DataDir,
    OpenBooks,
    TenantName,
    TenantOption,
    books,
)
from cachesvc.cli.money.receipts import receipt, receipt_keys, verify_receipt
from cachesvc.cli.render import AsJson, note, print_json, print_table

app = typer.Typer(help="Tokens by class, what they cost and what hits saved")


@app.callback(invoke_without_command=True)
def usage(
    context: typer.Context,
    tenant: TenantOption = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Without a command: all usage, by tenant."""
    if context.invoked_subcommand is None:
        with books(data_dir, database) as open_books:
            _show(usage_report.total(open_books.store, tenant), json)


for command in (receipt, receipt_keys, verify_receipt):
    app.command()(command)

Since = Annotated[
    str | None, typer.Option(help="First day: 2026-11-01, today, yesterday, or 7d for a week back")
]
Until = Annotated[str | None, typer.Option(help="Last day, written alike")]
Breakdown = Annotated[Split | None, typer.Option(help="Split each period by model, project or key")]
Timezone = Annotated[
    str, typer.Option(help="Where days begin: UTC, local, or a name such as Asia/Shanghai")
]


@app.command()
def daily(
    tenant: TenantOption = None,
    since: Since = None,
    until: Until = None,
    breakdown: Breakdown = None,
    timezone: Timezone = "UTC",
    days: Annotated[int, typer.Option(min=1, help="How many days back, without --since")] = 31,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Usage by day."""
    query = span(tenant, since or f"{days - 1}d", until, breakdown, timezone)
    with books(data_dir, database) as open_books:
        _show(report(open_books.store, query, Unit.DAY), json)


@app.command()
def monthly(
    tenant: TenantOption = None,
    since: Since = None,
    until: Until = None,
    breakdown: Breakdown = None,
    timezone: Timezone = "UTC",
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Usage by month."""
    query = span(tenant, since, until, breakdown, timezone)
    with books(data_dir, database) as open_books:
        _show(report(open_books.store, query, Unit.MONTH), json)


@app.command()
def session(
    tenant: TenantOption = None,
    since: Since = None,
    until: Until = None,
    timezone: Timezone = "UTC",
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the latest first")] = 50,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Usage by the session that requests name; a session counts on the day it was used last."""
    query = span(tenant, since, until, None, timezone)
    with books(data_dir, database) as open_books:
        _show(usage_report.by_session(open_books.store, query, limit=limit), json)


@app.command()
def statusline(
    tenant: TenantOption = None,
    timezone: Timezone = "local",
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Today and this month in one line, for a prompt or a status bar."""
    zone = zone_of(timezone)
    today = datetime.now(zone).date()
    query = Query(tenant=tenant, since=today.replace(day=1), until=today, zone=zone)
    with books(data_dir, database) as open_books:
        found = report(open_books.store, query, Unit.DAY)
    of_today = [period for period in found if period.period == today.isoformat()]
    if json:
        print_json({"today": _sums(of_today), "month": _sums(found)})
        return
    day = sum(period.requests for period in of_today)
    hit, prompt = sum(p.hit for p in of_today), sum(p.prompt for p in of_today)
    parts = [
        f"today {_amounts(of_today)}",
        number_of(day, "request"),
        f"hit {percent(hit, prompt)}",
    ]
    typer.echo(" | ".join([*parts, f"saved {_savings(of_today)}", f"month {_amounts(found)}"]))


def span(
    tenant: str | None,
    since: str | None,
    until: str | None,
    breakdown: Split | None,
    timezone: str,
) -> Query:
    """The query that the options ask for; ends the command for a day or zone that is none."""
    try:
        return parse_query(
            tenant=tenant, since=since, until=until, zone=zone_of(timezone), split=breakdown
        )
    except InvalidSpan as error:
        raise typer.BadParameter(str(error), param_hint="--since, --until") from None


def zone_of(name: str) -> tzinfo:
    try:
        return LocalZone() if name == "local" else find_zone(name)
    except InvalidName as error:
        raise typer.BadParameter(f"{error}, or local", param_hint="--timezone") from None


def _sums(periods: list[Period]) -> list[dict[str, object]]:
    """One document a currency."""
    return [
        {
            "currency": currency,
            "requests": sum(period.requests for period in mine),
            "prompt_tokens": sum(period.prompt for period in mine),
            "hit_tokens": sum(period.hit for period in mine),
            "output_tokens": sum(period.tokens["output"] for period in mine),
            "amount": format_units(sum(period.amount for period in mine)),
            "saved": format_units(sum(period.saved for period in mine)),
        }
        for currency, mine in _by_currency(periods).items()
    ]


def _by_currency(periods: list[Period]) -> dict[str, list[Period]]:
    found: dict[str, list[Period]] = {}
    for period in periods:
        found.setdefault(period.currency, []).append(period)
    return found


def _amounts(periods: list[Period]) -> str:
    return _money(periods, lambda period: period.amount)


def _savings(periods: list[Period]) -> str:
    return _money(periods, lambda period: period.saved)


def _money(periods: list[Period], of: Callable[[Period], int]) -> str:
    sums = {currency: sum(map(of, mine)) for currency, mine in _by_currency(periods).items()}
    return (
        " + ".join(f"{format_units(units)} {currency}" for currency, units in sums.items()) or "0"
    )


class InvoiceFormat(StrEnum):
    JSON = "json"
    CSV = "csv"
    HTML = "html"


@app.command()
def invoice(
    tenant: TenantName,
    month: Annotated[str | None, typer.Argument(help="Such as 2026-11  [this month]")] = None,
    form: Annotated[InvoiceFormat, typer.Option("--format", help="How to print it")] = (
        InvoiceFormat.JSON
    ),
    timezone: Timezone = "UTC",
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Print a tenant's month as JSON, CSV or a page for a printer."""
    zone = zone_of(timezone)
    with books(data_dir, database) as open_books:
        month = month or datetime.now(zone).strftime("%Y-%m")
        found = statements.invoice(open_books.store, tenant, month, zone)
        if form is InvoiceFormat.JSON:
            print_json(statements.invoice_json(found))
        elif form is InvoiceFormat.CSV:
            typer.echo(statements.invoice_csv(found), nl=False)
        else:
            typer.echo(statements.invoice_html(found))


class ExportFormat(StrEnum):
    CLOUDEVENTS = "cloudevents"
    FOCUS = "focus"


@app.command()
def export(
    to: Annotated[Path, typer.Option("--to", help="File to append to")],
    form: Annotated[ExportFormat, typer.Option("--format", help="What to write")] = (
        ExportFormat.CLOUDEVENTS
    ),
    name: Annotated[
        str | None, typer.Option(help="Name of this export's position  [format and file]")
    ] = None,
    source: Annotated[
        str, typer.Option(help="CloudEvents: this ledger's own URI, where one receiver has several")
    ] = "cachesvc",
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Append what is new since the last export of this name; ids are stable, nothing is skipped.

    After a crash some entries may come twice, with the same id: drop those that you have.
    """
    with books(data_dir, database) as open_books, exports.appending(to) as file:
        sink = partial(_append, open_books, file, form, source)
        position = name or f"{form}:{to.resolve()}"
        sent = exports.drain(open_books.store, position, sink)
        note(f"{number_of(sent, 'entry', 'entries')} written to {to}")


def _append(
    open_books: OpenBooks, file: BinaryIO, form: ExportFormat, source: str, entries: list[Entry]
) -> None:
    if form is ExportFormat.CLOUDEVENTS:
        data = exports.cloud_event_lines(entries, source)
    else:
        corrected = exports.corrected_instants(open_books.store, entries)
        rows = exports.focus_rows(entries, open_books.accounts.book, corrected)
        data = exports.focus_csv(rows, header=file.seek(0, os.SEEK_END) == 0)
    exports.write_durably(file, data)


def _show(periods: list[Period], json: bool) -> None:
    if json:
        print_json([period.as_json() for period in periods])
        return
    split = any(period.part for period in periods)
    columns = (
        *("requests", "prompt", "hit", "hit rate", "device", "host", "disk", "miss", "output"),
        *("cost", "saved"),
    )
    print_table(
        ("tenant", "period", *(("of",) if split else ()), *columns),
        [
            (
                period.tenant,
                period.period,
                *((period.part,) if split else ()),
                period.requests,
                period.prompt,
                period.hit,
                percent(period.hit, period.prompt),
                period.tokens["hit_device"],
                period.tokens["hit_host"],
                period.tokens["hit_disk"],
                period.tokens["miss"],
                period.tokens["output"],
                f"{format_units(period.amount)} {period.currency}",
                f"{format_units(period.saved)} {period.currency}",
            )
            for period in periods
        ],
        right=columns,
        spare=("device", "host", "disk", "miss", "hit", "saved", "requests"),
    )
    if not periods:
        note("nothing was used in this time")
