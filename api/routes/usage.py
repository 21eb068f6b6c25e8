"""A customer's view of usage and money: usage, requests, statements, receipts, limits.

Only the caller's own tenant is shown. The store is read off the event loop.
"""

import asyncio
import io
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from api.context import authorised, wire_of
from api.errors import RecordNotFound
from billing.keys import Scope
from billing.operations.books import OpenBooks
from billing.operations.ledger import list_entries
from billing.operations.usage import StatementForm, make_statement, period_usage, session_usage
from billing.reports.csv import safe_writer
from billing.reports.documents import tenant_document
from billing.reports.standing import standing
from billing.reports.usage import Unit
from billing.usage import CLASSES

router = APIRouter(tags=["usage"])

MOST_ROWS = 1000
Read = TypeVar("Read")
Form = Annotated[Literal["json", "csv"], Query(alias="format")]
Day = Annotated[
    str | None, Query(description="A day: 2026-11-01, today, yesterday, or 7d for a week back")
]
Timezone = Annotated[str, Query(description="Where days begin, such as Asia/Shanghai")]
Breakdown = Annotated[
    str | None,
    Query(max_length=80, description="By model, project, key, session, user or tag:NAME"),
]
Most = Annotated[int, Query(ge=1, le=MOST_ROWS)]
Month = Annotated[str, Path(description="Such as 2026-11")]
Row = dict[str, Any]


async def own(request: Request, operation: Callable[..., Read], **asked: Any) -> Read:
    """What an operation on the books says of the caller's tenant."""
    principal = await authorised(request, Scope.USAGE)
    books = wire_of(request).books.opened
    return await asyncio.to_thread(operation, books, tenant=principal.tenant, **asked)


@router.get("/v1/usage", response_model=None)
async def usage(
    request: Request,
    unit: Unit = Unit.DAY,
    since: Day = None,
    until: Day = None,
    timezone: Timezone = "UTC",
    breakdown: Breakdown = None,
    form: Form = "json",
) -> list[Row] | Response:
    """Your usage by day, by month or in total; by default the last 31 days."""
    first = since or (None if unit is Unit.ALL else "30d")
    span = {"unit": unit, "since": first, "until": until, "timezone": timezone}
    return _table(await own(request, period_usage, **span, breakdown=breakdown), form)


@router.get("/v1/usage/sessions", response_model=None)
async def sessions(
    request: Request, since: Day = None, until: Day = None, limit: Most = 100, form: Form = "json"
) -> list[Row] | Response:
    """Your usage by session, latest first."""
    rows = await own(request, session_usage, since=since, until=until, limit=limit)
    return _table(rows, form)


@router.get("/v1/usage/entries", response_model=None)
async def entries(
    request: Request,
    before: Annotated[
        int | None, Query(ge=1, lt=1 << 63, description="Older than this number")
    ] = None,
    request_id: Annotated[str | None, Query(description="One request, by any id of it")] = None,
    limit: Most = 100,
    form: Form = "json",
) -> list[Row] | Response:
    """Your charges, payments and corrections, newest first; or those of one request."""
    rows = await own(request, list_entries, before=before, request_id=request_id, limit=limit)
    if request_id is not None and not rows:
        raise RecordNotFound(f"no charge of yours has the id {request_id[:80]!r}")
    return _table([_flat(row) for row in rows] if form == "csv" else rows, form)


@router.get("/v1/usage/statement/{month}", response_model=None)
async def statement(
    request: Request,
    month: Month,
    timezone: Timezone = "UTC",
    breakdown: Breakdown = None,
    form: Form = "json",
) -> Row | Response:
    """Your month, as JSON or CSV, with an optional breakdown by user and key."""
    asked = {"month": month, "timezone": timezone, "breakdown": breakdown}
    made = await own(request, make_statement, **asked, format=StatementForm(form))
    return Response(made, media_type="text/csv") if isinstance(made, str) else made


@router.get("/v1/usage/account")
async def account(request: Request) -> Row:
    """Your balance, debt, holds and limits, and what is left of your grants and limits."""
    return await own(request, _account)


def _account(books: OpenBooks, *, tenant: str) -> Row:
    more = standing(books.store, tenant, time.time_ns())
    return tenant_document(books.accounts.tenant(tenant)) | more


def _table(rows: list[Row], form: str) -> list[Row] | Response:
    if form == "json":
        return rows
    out = io.StringIO()
    write = safe_writer(out)
    if rows:
        write(rows[0])
    for row in rows:
        write("" if value is None else value for value in row.values())
    return Response(out.getvalue(), media_type="text/csv")


def _flat(row: Row) -> Row:
    """An entry on one line."""
    details, plain = row["details"], ("tenant", "entry", "kind", "request_id", "currency", "amount")
    return {name: row[name] for name in plain} | {
        "at_ns": details.get("billed_ns", row["at_ns"]),
        **{name: details.get(name, "") for name in ("model", "key", "session", "user", "outcome")},
        "tags": " ".join(f"{name}={value}" for name, value in details.get("tags", {}).items()),
        **{name: details.get("usage", {}).get(name, 0) for name in CLASSES},
    }
