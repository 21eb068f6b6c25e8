"""`cachesvc usage`: tokens by class, what they cost and what hits saved; statements and exports."""

import os
from datetime import tzinfo
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from api.format import number_of, percent
from billing.errors import InvalidName, InvalidSpan
from billing.gate.entries import Entry
from billing.operations import usage as usages
from billing.operations.books import Books
from billing.operations.usage import StatementForm
from billing.prices.time_zones import LocalZone, find_zone
from billing.reports.documents import Document
from billing.reports.usage import Unit, parse_query
from cachesvc.cli.lazy import without
from cachesvc.cli.money.books import (
    MOST_ROWS,
    DatabaseUrl,
    DataDir,
    TenantOption,
    books,
)
from cachesvc.cli.money.invocation import Invocation, operating
from cachesvc.cli.money.receipts import receipt
from cachesvc.cli.render import Column, fail, note, print_documents, print_json
from cachesvc.config.places import local_zone_name

_REMOVED = {
    "daily": "`cachesvc usage --by day`",
    "monthly": "`cachesvc usage --by month`",
    "session": "`cachesvc usage --by session`",
    "statement": "`cachesvc usage --statement MONTH --tenant TENANT`",
    "statusline": "`cachesvc usage --since today`",
    "receipt-keys": "`cachesvc usage receipt --public-keys`",
    "verify-receipt": "`cachesvc usage receipt --check FILE`",
}

app = typer.Typer(cls=without(_REMOVED))
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
        str | None,
        typer.Option(help="First day: 2026-11-01, today, yesterday, or 7d for a week back"),
    ] = None,
    until: Annotated[str | None, typer.Option(help="Last day, in the same formats")] = None,
    breakdown: Annotated[
        str | None, typer.Option(help="Split days or months by model, project, key, user ...")
    ] = None,
    timezone: Annotated[
        str | None,
        typer.Option(help="Where days begin: a name such as Asia/Shanghai, or local  [UTC]"),
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
    zone = _checked_span(since, until, timezone or "UTC", breakdown)
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


def _checked_span(
    since: str | None, until: str | None, timezone: str, breakdown: str | None
) -> str:
    """The time zone for operations; ends the command for an invalid day, zone or part."""
    zone = _zone(timezone)
    try:
        parse_query(since=since, until=until, zone=zone, split=breakdown)
    except InvalidName as error:
        told = f"{error}; --by takes day and month too"
        raise typer.BadParameter(told, param_hint="--by, --breakdown") from None
    except InvalidSpan as error:
        raise typer.BadParameter(str(error), param_hint="--since, --until") from None
    # The server's own zone may be another.
    return local_zone_name() if timezone == "local" else timezone


def _zone(name: str) -> tzinfo:
    try:
        return LocalZone() if name == "local" else find_zone(name)
    except InvalidName as error:
        raise typer.BadParameter(f"{error}, or local", param_hint="--timezone") from None


def _print_statement(
    call: Invocation,
    tenant: str | None,
    month: str,
    zone: str,
    breakdown: str | None,
    form: StatementForm,
) -> None:
    """Prints a tenant's month as JSON, CSV or a printable page."""
    from billing.reports.statement import month_days  # it imports page templates

    if tenant is None:
        fail("a statement is for one tenant: add --tenant NAME", 2)
    month_days(month)
    made: Any = call(
        usages.make_statement,
        tenant=tenant,
        month=month,
        timezone=zone,
        breakdown=breakdown,
        format=form,
    )
    match form:
        case StatementForm.JSON:
            print_json(made)
        case StatementForm.CSV:
            typer.echo(made, nl=False)
        case StatementForm.HTML:
            typer.echo(made)


class ExportFormat(StrEnum):
    """The formats of an export to a file."""

    CLOUDEVENTS = "cloudevents"
    FOCUS = "focus"


@app.command()
def export(
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="File to append to, or a service: https:// takes CloudEvents; stripe+https:// "
            "and lago+https:// take their own events",
        ),
    ],
    form: Annotated[ExportFormat, typer.Option("--format", help="Format of the file")] = (
        ExportFormat.CLOUDEVENTS
    ),
    name: Annotated[
        str | None, typer.Option(help="Name of this export's position  [format and file or URL]")
    ] = None,
    source: Annotated[
        str, typer.Option(help="This ledger's own URI, if one receiver has several ledgers")
    ] = "cachesvc",
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the bearer token or key that the service asks for"),
    ] = None,
    reconcile: Annotated[
        str | None,
        typer.Option(help="Send nothing: compare with the events at this URL or in this file"),
    ] = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Send the entries that are new since the last export of this name. Nothing is skipped.

    Ids are stable. After a crash some entries may be sent twice: drop the ids you already have.
    """
    from billing.push.receiver import is_receiver, kind_of

    is_service = is_receiver(to)
    if is_service and form is not ExportFormat.CLOUDEVENTS:
        raise typer.BadParameter("a service has its own format", param_hint="--format")
    position = name or f"{kind_of(to) or form}:{to if is_service else Path(to).resolve()}"
    token = _token(token_file)
    with books(data_dir, database) as open_books:
        if reconcile is not None:
            _reconcile(open_books, position, to, reconcile, source, token)
        elif is_service:
            _send(open_books, position, to, source, token)
        else:
            _write(open_books, position, Path(to), form, source)


def _reconcile(
    open_books: Books, position: str, to: str, where: str, source: str, token: str
) -> None:
    from billing.push import lago
    from billing.push import reconcile as reconciling
    from billing.push.receiver import find_format, kind_of
    from billing.push.stripe import StripeMeters

    store = open_books.store
    form = find_format(where, token, source, store) if kind_of(where) else None
    if isinstance(form, StripeMeters):
        report = reconciling.reconcile_sums(store, position, form)
    else:
        found = reconciling.read_events(where, form, token)
        tells = {"tells": lago.tells} if kind_of(to) == "lago" else {}
        report = reconciling.reconcile(store, position, source, found, **tells)
    print_json(report.as_json())
    raise typer.Exit(0 if report.ok else 1)


def _send(open_books: Books, position: str, to: str, source: str, token: str) -> None:
    """Sends the events; exits with 1 if one was refused."""
    from billing.push.delivery import deliver
    from billing.push.receiver import find_format

    form = find_format(to, token, source, open_books.store)
    done = deliver(open_books.store, position, form)
    note(f"{number_of(done.sent, 'entry', 'entries')} sent to {to}")
    for tenant in done.unknown:
        note(
            f"tenant {tenant} is left out: nobody said what it is called there; add external_id to "
            "its [[buyer]], and `cachesvc invoice parties FILE`"
        )
    if done.refused:
        print_json(done.as_json())
        raise typer.Exit(1)


def _write(open_books: Books, position: str, path: Path, form: ExportFormat, source: str) -> None:
    from billing.reports import export as exports

    with exports.appending(path) as file:
        sink = partial(_append, open_books, file, form, source)
        sent = exports.drain(open_books.store, position, sink)
    note(f"{number_of(sent, 'entry', 'entries')} written to {path}")


def _token(file: Path | None) -> str:
    try:
        return "" if file is None else file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot be read: {error}", param_hint="--token-file") from None


def _append(
    open_books: Books, file: BinaryIO, form: ExportFormat, source: str, entries: list[Entry]
) -> None:
    from billing.reports import export as exports

    if form is ExportFormat.CLOUDEVENTS:
        data = exports.cloud_event_lines(entries, source)
    else:
        corrected = exports.corrected_instants(open_books.store, entries)
        rows = exports.focus_rows(entries, open_books.accounts.book, corrected)
        data = exports.focus_csv(rows, header=file.seek(0, os.SEEK_END) == 0)
    exports.write_durably(file, data)


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
