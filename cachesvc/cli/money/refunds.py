"""`cachesvc ledger rerate` and `refund`: what history would cost now, and giving back the rest."""

import json as jsonlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated

import typer

from api.format import number_of
from billing.errors import BillingError
from billing.gate.entries import Entry
from billing.ledger import Ledger
from billing.money import format_units
from billing.prices.book import NS
from billing.proof import rerate as plan
from billing.proof.refunds import Refund, RefundBatch, make_batch, read_batch
from billing.reports.documents import plan_document
from cachesvc.cli.money.books import DatabaseUrl, DataDir, TenantOption, actor, books
from cachesvc.cli.money.prices import print_plan
from cachesvc.cli.render import AsJson, fail, note, print_json

AT_ONCE = 256  # corrections that wait for the ledger together


def rerate(
    days: Annotated[int, typer.Option(min=1, help="How many days back")] = 31,
    out: Annotated[
        Path | None, typer.Option(help="Write what was charged too much here, for `ledger refund`")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", hidden=True)] = True,
    tenant: TenantOption = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """What past requests would cost under the cards as they stand now. Books nothing."""
    with books(data_dir, database) as open_books:
        open_books.accounts.expect(tenant)
        pricing = plan.under_book(open_books.accounts.book)
        since_ns = max(0, time.time_ns() - days * 86_400 * NS)
        found = plan.rerate(open_books.store, pricing, since_ns=since_ns, tenant=tenant)
        if json:
            print_json(plan_document(found))
        else:
            print_plan(found)
        if out is not None:
            batch = make_batch(
                open_books.store, pricing, made_by=actor(), since_ns=since_ns, tenant=tenant
            )
            _write(out, batch)


def refund(
    batch_file: Annotated[Path, typer.Argument(help="What `ledger rerate --out` wrote")],
    reason: Annotated[str, typer.Option(help="Why; kept in every entry")],
    approve: Annotated[
        str | None, typer.Option(help="The batch's digest: book it  [show it only]")
    ] = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Give back what a batch says, by one correction for each request, each booked once."""
    with books(data_dir, database) as open_books:
        batch = _read(batch_file)
        _tell(batch)
        if approve is None:
            note(f"nothing is booked: look at it, and say --approve {batch.digest}")
            return
        if approve != batch.digest:
            fail(f"--approve {approve} names another batch; this one is {batch.digest}")
        refused = open_books.with_ledger(lambda ledger: _book(ledger, batch, reason))
        booked = len(batch.refunds) - len(refused)
        note(f"{number_of(booked, 'request')} given back")
        for each in refused:
            typer.echo(each)
        if refused:
            fail(f"{number_of(len(refused), 'request')} refused")


def _book(ledger: Ledger, batch: RefundBatch, reason: str) -> list[str]:
    """Books the refunds; gives what was refused, and why."""
    refused: list[str] = []
    why = f"{reason} (batch {batch.digest} of {batch.made_by})"
    for start in range(0, len(batch.refunds), AT_ONCE):
        chunk = batch.refunds[start : start + AT_ONCE]
        asked = [_correct(ledger, each, batch.digest, why) for each in chunk]
        refused += _refused(chunk, asked)
    return refused


def _correct(ledger: Ledger, each: Refund, digest: str, why: str) -> "Future[Entry]":
    return ledger.correct(
        each.tenant,
        each.request_id,
        reference=f"rerate:{digest}:{each.request_id}",
        by=actor(),
        reason=why,
        amount=each.units,
    )


def _refused(chunk: Sequence[Refund], asked: "Sequence[Future[Entry]]") -> list[str]:
    refused: list[str] = []
    for each, future in zip(chunk, asked, strict=True):
        try:
            future.result()
        except BillingError as error:
            refused.append(f"REFUSED  {each.tenant}/{each.request_id}: {error}")
    return refused


def _write(out: Path, batch: RefundBatch) -> None:
    try:
        out.write_text(jsonlib.dumps(batch.document(), indent=1) + "\n")
    except OSError as error:
        fail(f"{out} cannot be written: {error}")
    _tell(batch)
    note(f"book it with: cachesvc ledger refund {out} --reason WHY --approve {batch.digest}")


def _read(path: Path) -> RefundBatch:
    try:
        return read_batch(path.read_bytes())
    except OSError as error:
        fail(f"{path} cannot be read: {error}")


def _tell(batch: RefundBatch) -> None:
    sums = ", ".join(f"{format_units(n)} {currency}" for currency, n in batch.totals().items())
    requests = number_of(len(batch.refunds), "request")
    note(f"batch {batch.digest} by {batch.made_by}: {requests}, {sums or 'nothing'} to give back")
    if batch.dearer:
        note(f"{number_of(batch.dearer, 'request')} would cost more now, and stay as they are")
