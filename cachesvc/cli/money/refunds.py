"""`cachesvc ledger rerate` and `refund`: what history would cost now, and giving back the rest."""

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from api.format import number_of
from billing.money import format_units
from billing.operations import ledger
from billing.proof.refunds import Refund, RefundBatch, read_batch
from cachesvc.cli.money.books import MOST_DAYS, DatabaseUrl, DataDir, TenantOption, actor
from cachesvc.cli.money.operations import Operations, operations
from cachesvc.cli.money.prices import print_plan
from cachesvc.cli.render import AsJson, fail, note, print_json

AT_ONCE = 256  # corrections in one call


def rerate(
    days: Annotated[int, typer.Option(min=1, max=MOST_DAYS, help="How many days back")] = 31,
    out: Annotated[
        Path | None, typer.Option(help="Write what was charged too much here, for `ledger refund`")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", hidden=True)] = True,
    tenant: TenantOption = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: AsJson = False,
) -> None:
    """Show what past requests would cost under the cards as they stand now. Books nothing."""
    with operations(data_dir, database) as call:
        found = call(ledger.rerate_history, tenant=tenant, days=days)
        print_json(found) if json else print_plan(found)
        if out is not None:
            _write(out, call(ledger.make_refunds, tenant=tenant, days=days, by=actor()))


def refund(
    batch_file: Annotated[Path, typer.Argument(help="What `ledger rerate --out` wrote")],
    reason: Annotated[str, typer.Option(help="Why; kept in every entry")],
    approve: Annotated[
        str | None, typer.Option(help="The batch's digest: book it  [show it only]")
    ] = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Give back what a batch says, by one correction for each request. Each is booked once."""
    with operations(data_dir, database) as call:
        batch = _read(batch_file)
        _print_batch(batch)
        if approve is None:
            note(f"nothing is booked: check it, then add --approve {batch.digest}")
            return
        if approve != batch.digest:
            fail(f"--approve {approve} names another batch; this one is {batch.digest}")
        refused = _book(call, batch, f"{reason} (batch {batch.digest} of {batch.made_by})")
        booked = len(batch.refunds) - len(refused)
        note(f"{number_of(booked, 'request')} given back")
        for each in refused:
            typer.echo(each)
        if refused:
            fail(f"{number_of(len(refused), 'request')} refused")


def _book(call: Operations, batch: RefundBatch, why: str) -> list[str]:
    """Books the refunds; gives what was refused, and why."""
    refused: list[str] = []
    for start in range(0, len(batch.refunds), AT_ONCE):
        corrections = [
            _correction(each, batch.digest) for each in batch.refunds[start : start + AT_ONCE]
        ]
        refused += call(ledger.correct_charges, corrections=corrections, by=actor(), why=why)
    return refused


def _correction(each: Refund, digest: str) -> dict[str, str]:
    return {
        "tenant": each.tenant,
        "request_id": each.request_id,
        "amount": each.amount,
        "reference": f"rerate:{digest}:{each.request_id}",
    }


def _write(out: Path, document: dict[str, Any]) -> None:
    text = jsonlib.dumps(document, indent=1) + "\n"
    try:
        out.write_text(text)
    except OSError as error:
        fail(f"{out} cannot be written: {error}")
    batch = read_batch(text.encode())
    _print_batch(batch)
    note(f"book it with: cachesvc ledger refund {out} --reason WHY --approve {batch.digest}")


def _read(path: Path) -> RefundBatch:
    try:
        return read_batch(path.read_bytes())
    except OSError as error:
        fail(f"{path} cannot be read: {error}")


def _print_batch(batch: RefundBatch) -> None:
    sums = ", ".join(f"{format_units(n)} {currency}" for currency, n in batch.totals().items())
    requests = number_of(len(batch.refunds), "request")
    note(f"batch {batch.digest} by {batch.made_by}: {requests}, {sums or 'nothing'} to give back")
    if batch.dearer:
        note(f"{number_of(batch.dearer, 'request')} would cost more now, and stay as they are")
