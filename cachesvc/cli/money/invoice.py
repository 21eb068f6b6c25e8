"""`cachesvc invoice`: issue invoices, track their state, and set seller and buyers."""

import sys
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from billing.errors import InvoiceError
from billing.invoices.render import Form
from billing.operations import invoices
from billing.operations.invoices import Mark
from billing.reports.documents import Document
from cachesvc.cli.lazy import without
from cachesvc.cli.money.books import (
    NO_REASON,
    TenantOption,
)
from cachesvc.cli.money.invocation import Invocation, operating
from cachesvc.cli.render import confirm, fail, note, print_documents, print_json

_REMOVED = {
    "list": "`cachesvc invoice show`, without a number",
    "finalize": "`cachesvc invoice issue TENANT MONTH`",
    "credit": "`cachesvc invoice issue NUMBER`",
}

app = typer.Typer(
    cls=without(_REMOVED),
    no_args_is_help=True,
    help="Issue invoices and credit notes",
)

Number = Annotated[str, typer.Argument(help="Such as INV-000012", show_default=False)]
Month = Annotated[str | None, typer.Argument(help="Such as 2026-11", show_default=False)]
HEADINGS = ("number", "kind", "tenant", "month", "state", "net", "total", "due", "due on")
COLUMNS = {heading: heading.replace(" ", "_") for heading in HEADINGS}


@app.command()
@operating("json")
def show(
    call: Invocation,
    what: Annotated[
        str | None, typer.Argument(help="A number; or a tenant, with MONTH  [list all]")
    ] = None,
    month: Month = None,
    tenant: TenantOption = None,
    form: Annotated[Form, typer.Option("--format", help="Format")] = Form.JSON,
    to: Annotated[Path | None, typer.Option("--to", help="A file  [standard output]")] = None,
) -> None:
    """List invoices and credit notes, newest first; or write one.

    Name it by its number, or by tenant and month. Until it is issued, it is a draft.
    """
    if what is None:
        _show(call(invoices.list_invoices, tenant=tenant), call.json)
        return
    if tenant is not None:
        fail("--tenant is for the list; name a tenant's month as TENANT MONTH", 2)
    if to is None and form is Form.PDF and sys.stdout.isatty():
        fail("a PDF cannot be printed here: add --to FILE")
    made = _made(call, what, month, form)
    _write(made, to)


def _made(call: Invocation, what: str, month: str | None, form: Form) -> Any:
    if month is None:
        return call(invoices.show_invoice, number=what, format=form)
    return call(invoices.show_month, tenant=what, month=month, format=form)


def _write(made: Any, to: Path | None) -> None:
    if isinstance(made, dict) and to is None:
        print_json(made)
        return
    data = made.encode() if isinstance(made, str) else made
    data = orjson.dumps(data) if isinstance(data, dict) else data
    if to is None:
        sys.stdout.buffer.write(data)
        return
    try:
        to.write_bytes(data)
    except OSError as error:
        fail(f"{to} cannot be written: {error.strerror}")


@app.command()
@operating("yes", "json")
def issue(
    call: Invocation,
    what: Annotated[
        str, typer.Argument(help="A tenant; or an invoice's number, for its credit note")
    ],
    month: Month = None,
    reason: Annotated[
        str | None,
        typer.Option(
            "--why", "--reason", help="Reason for the audit trail; a credit note needs one"
        ),
    ] = None,
) -> None:
    """Issue the invoice of a tenant's past month, or a credit note for an invoice.

    It takes a number and never changes again. A credit note covers what `ledger correct` has given
    back of the invoice's charges.
    """
    by = call.by
    if call.asks:
        of = "the invoice" if month is not None else "a credit note"
        note(_sums(_made(call, what, month, Form.JSON)))
        confirm(f"Issue {of} of {what}{f' for {month}' if month else ''}?", yes=False)
    if month is not None:
        why = reason or NO_REASON
        issued = call(invoices.finalize_invoice, tenant=what, month=month, by=by, why=why)
    elif reason is None:
        fail("a credit note needs --reason; for an invoice give TENANT MONTH", 2)
    else:
        issued = call(invoices.credit_invoice, number=what, by=by, why=reason)
    _one(issued, call.json)


@app.command()
@operating("why", "yes", "json")
def mark(
    call: Invocation,
    number: Number,
    state: Annotated[Mark, typer.Argument(help="paid or void")],
) -> None:
    """Mark an invoice as paid, or as void because it was wrong. Books no money."""
    if call.asks:
        note(_sums(call(invoices.show_invoice, number=number)))
        confirm(f"Mark {number} as {state}?", yes=False)
    marked = call(invoices.mark_invoice, number=number, state=state, by=call.by, why=call.why)
    _one(marked, call.json)


@app.command()
@operating("reason")
def parties(
    call: Invocation,
    file: Annotated[Path | None, typer.Argument(help="TOML with [seller] and [[buyer]]")] = None,
) -> None:
    """Set the seller and the buyers of invoices; without a file, print them."""
    if file is None:
        typer.echo(call(invoices.show_parties)["toml"], nl=False)
        return
    applied = call(invoices.apply_parties, toml=_read(file), by=call.by, why=call.why)
    named = len(applied["buyers"])
    buyers = "1 buyer is" if named == 1 else f"{named} buyers are"
    note(f"invoices are from {applied['seller']}; {buyers} named")


def _sums(found: Any) -> str:
    """A document's totals, in one line."""
    name = f"{found.get('number', 'draft')} of {found['tenant']} for {found['period']['month']}"
    sums = f"net {found['net']}, total {found['total']}, due {found['due']} {found['currency']}"
    return f"{name}, {found['state']}: {sums}"


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvoiceError(f"{file} cannot be read: {error}") from None


def _one(document: Document, json: bool) -> None:
    if json:
        print_json(document)
    else:
        _show([document | {"month": document["period"]["month"]}], json)


def _show(found: list[Document], json: bool) -> None:
    none = "no invoice was issued; `cachesvc invoice issue TENANT MONTH` issues one"
    numbers, spare = ("net", "total", "due"), ("kind", "net")
    print_documents(found, json, COLUMNS, right=numbers, spare=spare, none=none)
