"""`cachesvc usage`: tokens by class, what they cost and what hits saved; invoices and exports."""

from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from billing import export as exports
from billing import statements
from billing.entries import Entry
from billing.money import format_units
from billing.receipts import ReceiptSigner, receipt_for
from billing.statements import Period
from cachesvc.cli.books import Books, DatabaseUrl, DataDir, TenantOption, books
from cachesvc.cli.render import AsJson, note, percent, print_json, print_table

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
            _show(statements.total(open_books.store, tenant), json)


@app.command()
def daily(
    tenant: TenantOption = None,
    days: Annotated[int, typer.Option(min=1, help="How many days back")] = 31,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Usage by day (UTC)."""
    with books(data_dir, database) as open_books:
        _show(statements.by_day(open_books.store, tenant, days=days), json)


@app.command()
def monthly(
    tenant: TenantOption = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Usage by month (UTC)."""
    with books(data_dir, database) as open_books:
        _show(statements.by_month(open_books.store, tenant), json)


@app.command()
def session(
    tenant: TenantOption = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the latest first")] = 50,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Usage by the session that requests name."""
    with books(data_dir, database) as open_books:
        _show(statements.by_session(open_books.store, tenant, limit=limit), json)


class InvoiceFormat(StrEnum):
    JSON = "json"
    CSV = "csv"
    HTML = "html"


@app.command()
def invoice(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant")],
    month: Annotated[str | None, typer.Argument(help="Such as 2026-11  [this month]")] = None,
    form: Annotated[InvoiceFormat, typer.Option("--format", help="How to print it")] = (
        InvoiceFormat.JSON
    ),
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Print a tenant's month as JSON, CSV or a page for a printer."""
    with books(data_dir, database) as open_books:
        month = month or datetime.now(UTC).strftime("%Y-%m")
        found = statements.invoice(open_books.store, tenant, month)
        if form is InvoiceFormat.JSON:
            print_json(statements.invoice_json(found))
        elif form is InvoiceFormat.CSV:
            typer.echo(statements.invoice_csv(found), nl=False)
        else:
            typer.echo(statements.invoice_html(found))


@app.command()
def receipt(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant")],
    request_id: Annotated[str, typer.Argument(help="Id of the request")],
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Print the signed receipt of one request, as JSON."""
    with books(data_dir, database) as open_books:
        signer = ReceiptSigner.open(open_books.data_dir)
        book = open_books.accounts.book
        print_json(receipt_for(open_books.store, book, signer, tenant, request_id))


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
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Append what is new since the last export of this name; ids are stable, nothing is skipped."""
    with books(data_dir, database) as open_books:
        sink = partial(_append, open_books, to, form)
        position = name or f"{form}:{to.resolve()}"
        sent = exports.drain(open_books.store, position, sink)
        note(f"{sent} entries written to {to}")


def _append(open_books: Books, to: Path, form: ExportFormat, entries: list[Entry]) -> None:
    with to.open("ab") as file:
        if form is ExportFormat.CLOUDEVENTS:
            file.write(exports.cloud_event_lines(entries))
        else:
            first = file.tell() == 0
            file.write(exports.focus_csv(entries, open_books.accounts.book, header=first))


def _show(periods: list[Period], json: bool) -> None:
    if json:
        print_json([period.as_json() for period in periods])
        return
    columns = ("tenant", "period", "requests", "prompt", "hit", "hit rate", "device", "host")
    more = ("disk", "miss", "output", "cost", "saved")
    print_table(
        (*columns, *more),
        [
            (
                period.tenant,
                period.period,
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
        right=(*columns[2:], *more),
    )
    if not periods:
        note("nothing was used yet")
