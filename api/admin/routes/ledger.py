"""/admin/api/usage, holds, ledger, audit and receipts: what was used, charged, changed and proved.

The same operations and documents as `cachesvc usage|ledger`. Reading a proof is cheap, making one
reads every entry.
"""

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from api.admin.access import MayChange, MayRead
from api.admin.parts import Books, books_of, found
from api.admin.routes.account import OfTenant
from api.admin.routes.bodies import Correction
from api.errors import RecordNotFound
from api.page_headers import with_style
from billing.gate.entries import Entry
from billing.money import parse_positive
from billing.prices.book import NS
from billing.prices.time_zones import find_zone
from billing.proof import rerate as plan
from billing.proof.prover import Proved
from billing.reports import invoice as statements
from billing.reports import usage as usage_report
from billing.reports.documents import (
    Document,
    entry_document,
    hold_document,
    plan_document,
    proof_document,
    trail_document,
)
from billing.reports.heads import heads_document, heads_of
from billing.reports.receipts import receipt_for
from billing.reports.usage import Period, Split, Unit, parse_query
from billing.store import reports as store_reports

router = APIRouter(prefix="/admin/api", tags=["admin: ledger"])

MOST_ROWS = 1000

Limit = Annotated[int, Query(ge=1, le=MOST_ROWS, description="At most so many, newest first")]
Days = Annotated[int, Query(ge=1, le=3660, description="How many days back")]
Since = Annotated[
    str | None, Query(description="First day: 2026-11-01, today, yesterday, or 7d for a week back")
]
Until = Annotated[str | None, Query(description="Last day, written alike")]
Timezone = Annotated[str, Query(description="Where days begin, such as Asia/Shanghai")]
Breakdown = Annotated[Split | None, Query(description="Split by model, project or key")]
Month = Annotated[str, Path(pattern=r"^\d{4}-(0[1-9]|1[0-2])$", description="Such as 2026-11")]


@router.get("/usage")
def usage(request: Request, _: MayRead, tenant: OfTenant = None) -> list[Document]:
    """All usage, by tenant."""
    with found():
        return _periods(usage_report.total(books_of(request).store, tenant))


@router.get("/usage/daily")
def daily(
    request: Request,
    _: MayRead,
    tenant: OfTenant = None,
    since: Since = None,
    until: Until = None,
    timezone: Timezone = "UTC",
    breakdown: Breakdown = None,
    days: Days = 31,
) -> list[Document]:
    """Usage by tenant and day, oldest first; `days` back where `since` is not given."""
    query = parse_query(
        tenant=tenant,
        since=since or f"{days - 1}d",
        until=until,
        zone=timezone,
        split=breakdown,
    )
    with found():
        return _periods(usage_report.report(books_of(request).store, query, Unit.DAY))


@router.get("/usage/monthly")
def monthly(
    request: Request,
    _: MayRead,
    tenant: OfTenant = None,
    since: Since = None,
    until: Until = None,
    timezone: Timezone = "UTC",
    breakdown: Breakdown = None,
) -> list[Document]:
    """Usage by tenant and month, oldest first."""
    query = parse_query(tenant=tenant, since=since, until=until, zone=timezone, split=breakdown)
    with found():
        return _periods(usage_report.report(books_of(request).store, query, Unit.MONTH))


@router.get("/usage/session")
def session(
    request: Request,
    _: MayRead,
    tenant: OfTenant = None,
    since: Since = None,
    until: Until = None,
    timezone: Timezone = "UTC",
    limit: Limit = 50,
) -> list[Document]:
    """Usage by the session that requests name, the latest first."""
    query = parse_query(tenant=tenant, since=since, until=until, zone=timezone)
    with found():
        return _periods(usage_report.by_session(books_of(request).store, query, limit=limit))


@router.get("/usage/invoice/{tenant}/{month}", response_model=None)
def invoice(
    request: Request,
    tenant: str,
    month: Month,
    _: MayRead,
    form: Annotated[Literal["json", "csv", "html"], Query(alias="format")] = "json",
    timezone: Timezone = "UTC",
) -> Document | Response:
    """A tenant's month, as JSON, CSV or a page for a printer."""
    with found():
        made = statements.invoice(books_of(request).store, tenant, month, find_zone(timezone))
    if form == "csv":
        return Response(statements.invoice_csv(made), media_type="text/csv")
    if form == "html":
        page = statements.invoice_html(made)
        return Response(page, media_type="text/html", headers=with_style(page))
    return statements.invoice_json(made)


@router.get("/holds")
def holds(request: Request, _: MayRead, tenant: OfTenant = None) -> list[Document]:
    """What running requests have on hold, the oldest first."""
    books = books_of(request)
    with found():
        books.accounts.expect(tenant)
    with books.store.reading() as connection:
        stored = store_reports.hold_list(connection, tenant)
    now_ns = time.time_ns()
    documents = [hold_document(hold, now_ns) for hold in stored]
    return sorted(documents, key=lambda document: -float(document["age_s"]))


@router.get("/ledger")
def ledger(request: Request, _: MayRead) -> Document:
    """How large the ledger is, what its thread did, and the last proof of it."""
    books = books_of(request)
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
def verify(request: Request, _: MayRead) -> Document | None:
    """Prove the whole ledger now; `ok` is false where anything differs. Changes nothing."""
    return _proved(books_of(request).prover.prove())


@router.get("/ledger/heads")
def heads(request: Request, _: MayRead) -> Document:
    """The last hash of each tenant and of the admin trail, to keep where nobody can change it."""
    return heads_document(heads_of(books_of(request).store))


@router.get("/ledger/entries/{tenant}")
def entries(
    request: Request,
    tenant: str,
    _: MayRead,
    request_id: Annotated[str | None, Query(description="Its charge and what corrected it")] = None,
    before: Annotated[
        int | None, Query(ge=1, lt=1 << 63, description="Older than this number")
    ] = None,
    limit: Limit = 50,
) -> list[Document]:
    """Entries of a tenant, newest first; or those of one request."""
    books = books_of(request)
    with found():
        books.accounts.tenant(tenant)
    with books.store.reading() as connection:
        if request_id is not None:
            read = store_reports.request_entries(connection, tenant, request_id)
        else:
            read = store_reports.last_entries(connection, tenant, limit, before)
    return [entry_document(entry) for entry in read]


@router.get("/ledger/rerate")
def rerate(request: Request, _: MayRead, tenant: OfTenant = None, days: Days = 31) -> Document:
    """What past requests would cost under the cards as they stand now. Changes nothing."""
    books = books_of(request)
    with found():
        books.accounts.expect(tenant)
    since_ns = time.time_ns() - days * 86_400 * NS
    pricing = plan.under_book(books.accounts.book)
    return plan_document(plan.rerate(books.store, pricing, since_ns=since_ns, tenant=tenant))


@router.post("/ledger/correct")
def correct(request: Request, body: Correction, by: MayChange) -> Document:
    """Give back a charge, or a part of it, by a new entry that names it."""
    books = books_of(request)
    with found():
        books.accounts.tenant(body.tenant)
        entry: Entry = books.ledger.correct(
            body.tenant,
            body.request_id,
            reference=body.reference or f"correct:{body.request_id}",
            by=by.name,
            reason=body.why,
            amount=None if body.amount is None else parse_positive(body.amount),
        ).result()
    return entry_document(entry)


@router.get("/audit")
def audit(request: Request, _: MayRead, limit: Limit = 50) -> list[Document]:
    """What administrators changed: who, what, before, after and why; the newest first."""
    return [trail_document(row) for row in books_of(request).accounts.trail(limit)]


@router.get("/receipts/{tenant}/{request_id}")
def receipt(request: Request, tenant: str, request_id: str, _: MayRead) -> Document:
    """The signed receipt of one request."""
    books = books_of(request)
    if not _entries(books, tenant, request_id):
        raise RecordNotFound(f"tenant '{tenant}' has no settled request '{request_id}'")
    return receipt_for(books.store, books.accounts.book, books.signer, tenant, request_id)


def _entries(books: Books, tenant: str, request_id: str) -> list[Entry]:
    with books.store.reading() as connection:
        return store_reports.request_entries(connection, tenant, request_id)


def _periods(periods: list[Period]) -> list[Document]:
    return [period.as_json() for period in periods]


def _proved(proved: Proved | None) -> Document | None:
    if proved is None:
        return None
    document: dict[str, Any] = proof_document(proved.proof, proved.took_s)
    return document | {"at_ns": proved.at_ns}
