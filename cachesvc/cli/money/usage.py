"""`cachesvc usage`: tokens by class, what they cost and what hits saved; statements and exports."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from api.format import number_of, percent
from billing.errors import InvalidName
from billing.gate.entries import Entry
from billing.operations import usage as usages
from billing.operations.books import Books
from billing.operations.usage import StatementForm
from billing.reports.attribution import check_split
from billing.reports.documents import Document
from billing.reports.usage import Unit
from cachesvc.cli.lazy import Group
from cachesvc.cli.money.books import MOST_ROWS, DatabaseUrl, TenantOption, books
from cachesvc.cli.money.invocation import Invocation, operating
from cachesvc.cli.money.receipts import receipt
from cachesvc.cli.options import DataDir
from cachesvc.cli.render import Column, fail, note, print_documents, print_json

app = typer.Typer(cls=Group)
app.command()(receipt)


PERIODS = ("day", "month", "session")


@app.callback(invoke_without_command=True)
@operating("json")
def usage(
    call: Invocation,
    context: typer.Context,
    by: Annotated[
        str | None,
        typer.Option(
            help="Sum by day, month, session, model, project, key, user or tag:NAME  [all time]"
        ),
    ] = None,
    tenant: TenantOption = None,
    since: Annotated[
        str | None, typer.Option(help="First day: 2026-11-01, today, yesterday, or 7d ago")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Last day, in the same formats")] = None,
    breakdown: Annotated[
        str | None, typer.Option(help="Split days or months by model, project, key, user ...")
    ] = None,
    timezone: Annotated[
        str | None, typer.Option(help="Where days begin: such as Asia/Shanghai, or local  [UTC]")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=MOST_ROWS, help="At most this many sessions, latest first")
    ] = 50,
    statement: Annotated[
        str | None,
        typer.Option(metavar="MONTH", help="A statement of one tenant's month, such as 2026-11"),
    ] = None,
    form: Annotated[
        StatementForm, typer.Option("--format", help="Format of the statement")
    ] = StatementForm.JSON,
) -> None:
    """Show usage, cost and savings by tenant.

    Days go back a month unless --since is given.
    """
    if context.invoked_subcommand is not None:
        return
    if by is None and (since or until or breakdown):
        by = "day"
    if by not in (None, *PERIODS):
        by, breakdown = None, by
    try:
        breakdown is None or check_split(breakdown)
    except InvalidName as error:
        fail(f"{error}; --by takes day and month too", 2)
    zone = timezone or "UTC"
    if statement is not None:
        _print_statement(call, tenant, statement, zone, breakdown, form)
        return
    span: dict[str, Any] = {"tenant": tenant, "since": since, "until": until, "timezone": zone}
    if by == "session":
        found = call(usages.session_usage, **span, limit=limit)
    else:
        unit = Unit(by or "all")
        found = call(usages.period_usage, **span, unit=unit, breakdown=breakdown)
    _show(found, call.json)


def _print_statement(
    call: Invocation,
    tenant: str | None,
    month: str,
    zone: str,
    breakdown: str | None,
    form: StatementForm,
) -> None:
    from billing.reports.statement import month_days  # imports the database

    if tenant is None:
        fail("a statement is for one tenant: add --tenant NAME", 2)
    month_days(month)
    how: Any = {"timezone": zone, "breakdown": breakdown, "format": form}
    made: Any = call(usages.make_statement, tenant=tenant, month=month, **how)
    if form is StatementForm.CSV:
        typer.echo(made, nl=False)
    else:
        print_json(made)


@app.command()
def export(
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="A metering service's URL, which gets CloudEvents; or a CSV file, to which FOCUS "
            "cost rows are appended",
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of this export's position  [file or URL]")
    ] = None,
    source: Annotated[
        str, typer.Option(help="This ledger's own URI, if one receiver has several ledgers")
    ] = "cachesvc",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token that the service asks for")
    ] = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Send what is new since the last export of this name. Nothing is skipped.

    A service gets one event for each token class of a charge. Ids are stable. After a crash some
    may be sent twice: drop the ids you already have.
    """
    is_service = to.startswith(("https://", "http://"))
    if "://" in to and not is_service:
        told = f"{to} is neither a file nor https://; docs/billing.md maps the events for Stripe "
        raise typer.BadParameter(told + "and Lago", param_hint="--to")
    token = _token(token_file)
    with books(data_dir, database) as open_books:
        if is_service:
            from billing.push import push

            book = open_books.accounts.book
            sent = push(open_books.store, book, name or f"cloudevents:{to}", to, token, source)
        else:
            sent = _write(open_books, name or f"focus:{Path(to).resolve()}", Path(to))
    note(f"{number_of(sent, 'entry', 'entries')} {'sent' if is_service else 'written'} to {to}")


def _write(open_books: Books, position: str, path: Path) -> int:
    from billing.reports import export as exports

    with exports.appending(path) as file:
        return exports.drain(open_books.store, position, partial(_append, open_books, file))


def _token(file: Path | None) -> str:
    try:
        return "" if file is None else file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot be read: {error}", param_hint="--token-file") from None


def _append(open_books: Books, file: BinaryIO, entries: list[Entry]) -> None:
    from billing.reports import export as exports
    from billing.reports import focus

    corrected = focus.corrected_instants(open_books.store, entries)
    rows = focus.focus_rows(entries, open_books.accounts.book, corrected)
    exports.write_durably(file, focus.focus_csv(rows, header=file.seek(0, os.SEEK_END) == 0))


_COLUMNS: dict[str, Column] = {
    "requests": "requests",
    "prompt": "prompt_tokens",
    "hit": "hit_tokens",
    "hit rate": lambda period: percent(period["hit_tokens"], period["prompt_tokens"]),
    "device": "hit_device_tokens",
    "host": "hit_host_tokens",
    "disk": "hit_disk_tokens",
    "miss": "miss_tokens",
    "output": "output_tokens",
    "cost": lambda period: f"{period['amount']} {period['currency']}",
    "saved": lambda period: f"{period['saved']} {period['currency']}",
}


def _show(periods: list[Document], json: bool) -> None:
    part = {"of": "part"} if any("part" in period for period in periods) else {}
    print_documents(
        periods,
        json,
        {"tenant": "tenant", "period": "period", **part, **_COLUMNS},
        right=tuple(_COLUMNS),
        spare=("device", "host", "disk", "miss", "hit", "saved", "requests"),
        none="nothing was used in this time",
    )
