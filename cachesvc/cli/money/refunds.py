"""Batches of refunds: `prices plan --out` writes one, `ledger correct --batch` books it."""

import json as jsonlib
from pathlib import Path
from typing import Any

import typer

from api.format import number_of
from billing.money import format_units
from billing.operations import ledger
from billing.proof.refunds import Refund, RefundBatch, read_batch
from cachesvc.cli.money.invocation import Invocation
from cachesvc.cli.render import fail, note

AT_ONCE = 256  # corrections in one call


def refund(call: Invocation, path: Path, approve: str | None) -> None:
    """Books a batch of corrections, each once, if `approve` is its digest; else only shows it."""
    batch = _read(path)
    _print_batch(batch)
    if approve is None:
        note(f"nothing is booked: check it, then add --approve {batch.digest}")
        return
    if approve != batch.digest:
        fail(f"--approve {approve} names another batch; this one is {batch.digest}")
    refused = _book(call, batch, f"{call.why} (batch {batch.digest} of {batch.made_by})")
    given = number_of(len(batch.refunds) - len(refused), "request")
    note(f"{given} given back, each once however often the batch is approved")
    for each in refused:
        typer.echo(each)
    if refused:
        fail(f"{number_of(len(refused), 'request')} refused")


def _book(call: Invocation, batch: RefundBatch, why: str) -> list[str]:
    """Books the refunds. Returns the refused ones with reasons."""
    refused: list[str] = []
    for start in range(0, len(batch.refunds), AT_ONCE):
        corrections = [
            _correction(each, batch.digest) for each in batch.refunds[start : start + AT_ONCE]
        ]
        refused += call(ledger.correct_charges, corrections=corrections, by=call.by, why=why)
    return refused


def _correction(each: Refund, digest: str) -> dict[str, str]:
    return {
        "tenant": each.tenant,
        "request_id": each.request_id,
        "amount": each.amount,
        "reference": f"rerate:{digest}:{each.request_id}",
    }


def write_batch(out: Path, document: dict[str, Any]) -> None:
    """Writes the batch of `prices plan --out`, for somebody else to approve."""
    text = jsonlib.dumps(document, indent=1) + "\n"
    try:
        out.write_text(text)
    except OSError as error:
        fail(f"{out} cannot be written: {error}")
    batch = read_batch(text.encode())
    _print_batch(batch)
    note(
        f"book it with: cachesvc ledger correct --batch {out} --reason WHY --approve {batch.digest}"
    )


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
