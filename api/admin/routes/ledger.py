"""/admin/api/usage, holds, ledger, audit and receipts.

Reading a proof is cheap; making one reads every entry. The operations themselves are in
`billing.operations`.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from api.admin.access import Books, MayChange, MayRead
from api.admin.routes.account import OfTenant
from api.admin.routes.bodies import Correction, Corrections
from api.page_headers import with_style
from api.routes.usage import Breakdown, Timezone
from billing.operations import ledger as ledgers
from billing.operations import usage as usages
from billing.operations.usage import StatementForm
from billing.proof.prover import Proved
from billing.reports.documents import Document, proof_document
from billing.reports.heads import heads_document, heads_of
from billing.reports.usage import Unit
from billing.store import reports as store_reports

router = APIRouter(prefix="/admin/api", tags=["admin: ledger"])

MOST_ROWS = 1000

Limit = Annotated[int, Query(ge=1, le=MOST_ROWS, description="At most so many, newest first")]
Days = Annotated[int, Query(ge=1, le=3660, description="How many days back")]
Since = Annotated[
    str | None, Query(description="First day: 2026-11-01, today, yesterday, or 7d for a week back")
]
Until = Annotated[str | None, Query(description="Last day, written alike")]
Month = Annotated[str, Path(pattern=r"^\d{4}-(0[1-9]|1[0-2])$", description="Such as 2026-11")]


@router.get("/usage")
def period_usage(
    books: Books,
    unit: Unit = Unit.ALL,
    tenant: OfTenant = None,
    since: Since = None,
    until: Until = None,
    timezone: Timezone = "UTC",
    breakdown: Breakdown = None,
) -> list[Document]:
    """Usage by tenant and by day or month, oldest first. Without `since`, days go back a month."""
    return usages.period_usage(
        books,
        unit=unit,
        tenant=tenant,
        since=since,
        until=until,
        timezone=timezone,
        breakdown=breakdown,
    )


@router.get("/usage/session")
def session_usage(
    books: Books,
    tenant: OfTenant = None,
    since: Since = None,
    until: Until = None,
    timezone: Timezone = "UTC",
    limit: Limit = 50,
) -> list[Document]:
    """Usage by session, latest first."""
    return usages.session_usage(
        books, tenant=tenant, since=since, until=until, timezone=timezone, limit=limit
    )


@router.get("/usage/statement/{tenant}/{month}", response_model=None)
def make_statement(
    books: Books,
    tenant: str,
    month: Month,
    form: Annotated[StatementForm, Query(alias="format")] = StatementForm.JSON,
    timezone: Timezone = "UTC",
    breakdown: Breakdown = None,
) -> Document | Response:
    """A tenant's month, as JSON, CSV or a printable page, with an optional breakdown."""
    made = usages.make_statement(
        books, tenant=tenant, month=month, timezone=timezone, breakdown=breakdown, format=form
    )
    if not isinstance(made, str):
        return made
    if form is StatementForm.HTML:
        return Response(made, media_type="text/html", headers=with_style(made))
    return Response(made, media_type="text/csv")


@router.get("/holds")
def list_holds(books: Books, tenant: OfTenant = None) -> list[Document]:
    """Holds of running requests, oldest first."""
    return ledgers.list_holds(books, tenant=tenant)


@router.get("/ledger")
def ledger(books: Books) -> Document:
    """The ledger's size, its thread's counters and its last proof."""
    with books.store.reading() as connection:
        num_entries = store_reports.num_entries(connection)
        num_holds = len(store_reports.hold_list(connection))
    stats = books.ledger.stats()
    return {
        "entries": num_entries,
        "holds": num_holds,
        "commands": stats.commands,
        "refused": stats.refused,
        "settled": stats.settled,
        "lapsed": stats.swept,
        "crashed": stats.recovered,
        "failed_commits": stats.failed_batches,
        "waiting": stats.queued,
        "proof": _proved(books.prover.last),
    }


@router.post("/ledger/verify")
def verify(books: Books) -> Document | None:
    """Prove the whole ledger now; `ok` is false if anything differs. Changes nothing."""
    return _proved(books.prover.prove())


@router.get("/ledger/heads")
def heads(books: Books) -> Document:
    """The last hash of each tenant and of the admin trail, to store where nobody can change it."""
    return heads_document(heads_of(books.store))


@router.get("/ledger/entries/{tenant}")
def list_entries(
    books: Books,
    tenant: str,
    request_id: Annotated[str | None, Query(description="Its charge and what corrected it")] = None,
    before: Annotated[
        int | None, Query(ge=1, lt=1 << 63, description="Older than this number")
    ] = None,
    limit: Limit = 50,
) -> list[Document]:
    """Entries of a tenant or of one request, newest first."""
    return ledgers.list_entries(
        books, tenant=tenant, request_id=request_id, before=before, limit=limit
    )


@router.get("/ledger/rerate")
def rerate_history(books: Books, tenant: OfTenant = None, days: Days = 31) -> Document:
    """What past requests would cost under the current cards. Changes nothing."""
    return ledgers.rerate_history(books, tenant=tenant, days=days)


@router.get("/ledger/refunds")
def make_refunds(books: Books, by: MayRead, tenant: OfTenant = None, days: Days = 31) -> Document:
    """A batch of corrections for charges above the current cards. Books nothing."""
    return ledgers.make_refunds(books, tenant=tenant, days=days, by=by.name)


@router.post("/ledger/correct")
def correct_charge(by: MayChange, books: Books, body: Correction) -> Document:
    """Refund a charge or a part of it, with a new entry that refers to it."""
    return ledgers.correct_charge(books, **body.model_dump(), by=by.name)


@router.post("/ledger/corrections")
def correct_charges(by: MayChange, books: Books, body: Corrections) -> list[str]:
    """Book many corrections, each reference once. Returns the refused ones with reasons."""
    return ledgers.correct_charges(books, **body.model_dump(), by=by.name)


@router.get("/audit")
def admin_trail(books: Books, limit: Limit = 50) -> list[Document]:
    """Changes by administrators: who, what, before, after and why; newest first."""
    return ledgers.admin_trail(books, limit=limit)


@router.get("/receipts/{tenant}/{request_id}")
def sign_receipt(books: Books, tenant: str, request_id: str) -> Document:
    """The signed receipt of one request."""
    return usages.sign_receipt(books, tenant=tenant, request_id=request_id)


def _proved(proved: Proved | None) -> Document | None:
    if proved is None:
        return None
    document: dict[str, Any] = proof_document(proved.proof, proved.took_s)
    return document | {"at_ns": proved.at_ns}
