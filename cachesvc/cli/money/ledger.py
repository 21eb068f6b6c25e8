"""`cachesvc ledger`: proves the ledger, rebuilds derived tables, corrects by new entries."""

import json as jsonlib
import sys
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from api.format import number_of
from billing.errors import ExportError
from billing.money import format_units, parse_units
from billing.operations import ledger as ledgers
from billing.operations.balance import adjust_deposit, show_balance
from billing.prices.book import NS
from billing.proof import audit
from billing.reports.documents import Document, proof_document
from billing.reports.heads import parse_heads, read_receipt_head, signed_heads
from cachesvc.cli.lazy import Group
from cachesvc.cli.money.books import MOST_ROWS, DatabaseUrl, TenantName, books
from cachesvc.cli.money.invocation import Invocation, operating
from cachesvc.cli.money.receipts import public_key_of
from cachesvc.cli.money.tenants import print_tenant
from cachesvc.cli.options import DataDir
from cachesvc.cli.render import AsJson, answer, confirm, fail, note, print_documents, print_json

HEADS_S = 30.0  # for a receiver of heads to answer
HOLD_NUMBERS = ("amount", "age_s", "expires_in_s")
HOLDS = ("tenant", "request_id", "amount", "model", "server", "age_s", "expires_in_s")

app = typer.Typer(cls=Group, no_args_is_help=True, help="Prove and correct the ledger")


@app.command()
def verify(
    heads: Annotated[
        str | None,
        typer.Option(
            help=(
                "Heads kept elsewhere, in a file or at a URL; proves that nothing was cut off "
                "or rewritten since"
            )
        ),
    ] = None,
    receipt: Annotated[
        list[Path] | None,
        typer.Option(help="A customer's receipt; proves its entry and all entries before it"),
    ] = None,
    public_key: Annotated[
        str | None, typer.Option(help="The published key, in hex  [those of the data directory]")
    ] = None,
    rebuild: Annotated[
        bool,
        typer.Option("--rebuild", help="First derive balances and statements from the entries"),
    ] = False,
    print_heads: Annotated[
        bool, typer.Option("--print-heads", help="Print the last hashes, signed, to keep elsewhere")
    ] = False,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Recompute every hash, charge and balance, and name the first entry that differs.

    Reads the database itself, so it need not trust the server.
    """
    with books(data_dir, database) as open_books:
        if rebuild:
            rebuilt = audit.rebuild(open_books.store)
            note(f"rebuilt from {number_of(rebuilt.num_entries, 'entry', 'entries')}")
        began = time.monotonic()
        key_of = partial(public_key_of, public_key, open_books.data_dir)
        known = parse_heads(_kept(heads), heads, key_of) if heads else []
        known += [read_receipt_head(path, key_of) for path in receipt or ()]
        proof = audit.verify(open_books.store, heads=known, progress=_progress)
        took_s = time.monotonic() - began
        if print_heads:
            if not proof.ok:
                fail(f"the ledger does not prove: {proof.problems[0]}")
            print_json(signed_heads(open_books.store, open_books.signer, time.time_ns()))
            return
    if json:
        print_json(proof_document(proof, took_s))
    else:
        for problem in proof.problems:
            typer.echo(f"DIFFERS  {problem}")
        verdict = "proved" if proof.ok else "NOT proved"
        entries = number_of(proof.num_entries, "entry", "entries")
        note(f"{verdict}: {entries} of {number_of(proof.num_tenants, 'tenant')}")
        for currency, units in proof.revenue.items():
            note(f"revenue {format_units(units)} {currency}")
    if not proof.ok:
        sys.exit(1)


@app.command()
@operating("json")
def show(
    call: Invocation,
    tenant: Annotated[str | None, typer.Argument(help="Name of the tenant")] = None,
    request_id: Annotated[str | None, typer.Argument(help="Id of the request")] = None,
    holds: Annotated[
        bool, typer.Option("--holds", help="List the holds of running requests, and their ages")
    ] = False,
    trail: Annotated[
        bool,
        typer.Option("--trail", help="List the changes that administrators made, newest first"),
    ] = False,
    limit: Annotated[
        int, typer.Option(min=1, max=MOST_ROWS, help="With --trail: at most this many")
    ] = 50,
) -> None:
    """Print the charge of a request and its corrections, as JSON; or list holds or changes."""
    if holds:
        found = call(ledgers.list_holds, tenant=tenant)
        print_documents(found, call.json, HOLDS, right=HOLD_NUMBERS, spare=("server", "model"))
        return
    if trail:
        changes = call(ledgers.admin_trail, limit=limit)
        answer(changes, call.json, *(line for row in changes for line in trail_lines(row)))
        return
    if tenant is None or request_id is None:
        fail("say which request: TENANT REQUEST_ID; or --holds, or --trail", 2)
    found = call(ledgers.list_entries, tenant=tenant, request_id=request_id)
    if not found:
        fail(f"request {request_id!r} of tenant {tenant!r} was never charged")
    print_json(found)


@app.command()
@operating("why", "yes")
def correct(
    call: Invocation,
    tenant: TenantName,
    request_id: Annotated[
        str,
        typer.Argument(
            help="Id of the request; or with --to a deposit's reference", show_default=False
        ),
    ],
    amount: Annotated[str | None, typer.Option(help="Give back this much  [all of it]")] = None,
    to: Annotated[
        str | None, typer.Option(help="What a top-up or grant should have been; 0 undoes it")
    ] = None,
    reference: Annotated[str | None, typer.Option(help="Your own id, booked once")] = None,
) -> None:
    """Give back a charge by a new entry that names it; or correct a deposit.

    A mistyped top-up or grant stays, and a new entry books the difference.
    """
    if to is not None and amount is not None:
        fail("--amount gives a charge back, --to corrects a deposit: leave one out", 2)
    if call.asks:
        _show_before(call, tenant, request_id, amount, to)
    if to is not None:
        given = {"deposit": request_id, "amount": to, "reference": reference}
        print_tenant(call.change(adjust_deposit, tenant=tenant, **given), json=False)
        return
    given = {"request_id": request_id, "amount": amount, "reference": reference}
    entry = call.change(ledgers.correct_charge, tenant=tenant, **given)
    note(f"entry {entry['entry']} gives back {entry['amount']} {entry['currency']}")


def _show_before(
    call: Invocation, tenant: str, name: str, amount: str | None, to: str | None
) -> None:
    if to is not None:
        has = call(show_balance, tenant=tenant)
        note(f"{tenant} has {has['balance']} {has['currency']}")
        confirm(f"Correct deposit {name!r} to {to} {has['currency']}?", yes=False)
        return
    found = call(ledgers.list_entries, tenant=tenant, request_id=name)
    if found:
        left = format_units(-sum(parse_units(entry["amount"]) for entry in found))
        currency = found[0]["currency"]
        note(f"request {name!r} of {tenant} was charged, and {left} {currency} are left of it")
        confirm(f"Give back {amount or left} {currency}?", yes=False)


def trail_lines(row: Document) -> Iterator[str]:
    """One change: when (UTC), who and what; below it the values before and after, and why."""
    at = datetime.fromtimestamp(row["at_ns"] // NS, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    yield (f"{row['seq']:>5}  {at}  {row['actor']}  {row['action']}  {row['subject']}")
    before, after = (row[name] or {} for name in ("before", "after"))
    changes = [
        f"{name} {_word(before, name)} -> {_word(after, name)}"
        if name in before
        else f"{name} {_word(after, name)}"
        for name in sorted(before | after)
        if before.get(name) != after.get(name)
    ]
    if row["reason"]:
        changes.append(f"why: {row['reason']}")
    yield from (f"       {change}" for change in changes)


def _word(values: Document, name: str) -> str:
    value = values.get(name)
    return "-" if value is None else value if isinstance(value, str) else jsonlib.dumps(value)


def _kept(where: str) -> bytes:
    """All lines of a file or a URL. Raises `ExportError`."""
    if where.startswith("s3://"):
        raise ExportError("heads in a bucket were removed: copy them to a file, and name that")
    try:
        if where.startswith(("http://", "https://")):
            with urllib.request.urlopen(where, timeout=HEADS_S) as answer:  # noqa: S310
                body: bytes = answer.read()
            return body
        return Path(where).read_bytes()
    except OSError as error:
        from cachesvc.config.sources import without_passwords

        shown = without_passwords(where)
        raise ExportError(f"the heads in {shown} cannot be read: {error}") from error


def _progress(num_entries: int) -> None:
    if sys.stderr.isatty() and num_entries % 100_000 == 0:
        note(f"{number_of(num_entries, 'entry', 'entries')} checked")
