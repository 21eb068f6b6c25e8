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
from billing.prices.time_zones import find_zone
from billing.reports import statement as statements
from billing.reports import usage as usage_report
from billing.reports.csv import safe_writer
from billing.reports.documents import entry_document, tenant_document
from billing.reports.standing import standing
from billing.reports.usage import Unit, parse_query
from billing.store import reports as store_reports
from billing.store.store import LedgerStore
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
Month = Annotated[str, Path(description="Such as 2026-11")]
Row = dict[str, Any]


async def read_own(request: Request, read: Callable[[LedgerStore, str], Read]) -> Read:
    """The result of `read` for the caller's tenant."""
    principal = await authorised(request, Scope.USAGE)
    return await asyncio.to_thread(read, wire_of(request).books.store, principal.tenant)


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

    def read(store: LedgerStore, tenant: str) -> list[Row]:
        first = since or (None if unit is Unit.ALL else "30d")
        query = parse_query(tenant=tenant, since=first, until=until, zone=timezone, split=breakdown)
        return [period.as_json() for period in usage_report.report(store, query, unit)]

    return _table(await read_own(request, read), form)


@router.get("/v1/usage/sessions", response_model=None)
async def sessions(
    request: Request,
    since: Day = None,
    until: Day = None,
    limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 100,
    form: Form = "json",
) -> list[Row] | Response:
    """Your usage by session, latest first."""

    def read(store: LedgerStore, tenant: str) -> list[Row]:
        query = parse_query(tenant=tenant, since=since, until=until)
        return [period.as_json() for period in usage_report.by_session(store, query, limit=limit)]

    return _table(await read_own(request, read), form)


@router.get("/v1/usage/entries", response_model=None)
async def entries(
    request: Request,
    before: Annotated[
        int | None, Query(ge=1, lt=1 << 63, description="Older than this number")
    ] = None,
    request_id: Annotated[str | None, Query(description="One request, by any id of it")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 100,
    form: Form = "json",
) -> list[Row] | Response:
    """Your charges, payments and corrections, newest first; or those of one request."""

    def read(store: LedgerStore, tenant: str) -> list[Row]:
        with store.reading() as connection:
            if request_id is None:
                found = store_reports.last_entries(connection, tenant, limit, before)
            else:
                found = store_reports.request_entries(connection, tenant, request_id)
        return [entry_document(entry) for entry in found]

    rows = await read_own(request, read)
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
    zone = find_zone(timezone)
    made = await read_own(
        request, lambda store, tenant: statements.statement(store, tenant, month, zone, breakdown)
    )
    if form == "csv":
        return Response(statements.statement_csv(made), media_type="text/csv")
    return statements.statement_json(made)


@router.get("/v1/usage/account")
async def account(request: Request) -> Row:
    """Your balance, debt, holds and limits, and what is left of your grants and limits."""
    principal = await authorised(request, Scope.USAGE)
    tenant = await asyncio.to_thread(wire_of(request).books.balances, principal.tenant)
    more = await read_own(request, lambda store, name: standing(store, name, time.time_ns()))
    return tenant_document(tenant) | more


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
