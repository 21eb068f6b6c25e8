"""Usage and cost by tenant, day, month and session, and as a statement."""

from datetime import tzinfo
from enum import StrEnum

from billing.operations.arguments import Breakdown, Limit, Month, OfTenant, Since, Timezone, Until
from billing.operations.books import Books
from billing.prices.time_zones import LocalZone, find_zone
from billing.reports import usage as reports
from billing.reports.documents import Document
from billing.reports.usage import Unit, parse_query


def period_usage(
    books: Books,
    *,
    unit: Unit = Unit.ALL,
    tenant: OfTenant = None,
    since: Since = None,
    until: Until = None,
    timezone: Timezone = "UTC",
    breakdown: Breakdown = None,
) -> list[Document]:
    """Usage by tenant and by day or month, oldest first. Without `since`, days go back a month."""
    first = since or ("30d" if unit is Unit.DAY else None)
    zone = _zone(timezone)
    query = parse_query(tenant=tenant, since=first, until=until, zone=zone, split=breakdown)
    return [period.as_json() for period in reports.report(books.store, query, unit)]


def session_usage(
    books: Books,
    *,
    tenant: OfTenant = None,
    since: Since = None,
    until: Until = None,
    timezone: Timezone = "UTC",
    limit: Limit = 50,
) -> list[Document]:
    """Usage by session, latest first."""
    query = parse_query(tenant=tenant, since=since, until=until, zone=_zone(timezone))
    return [period.as_json() for period in reports.by_session(books.store, query, limit=limit)]


class StatementForm(StrEnum):
    """The format of a statement."""

    JSON = "json"
    CSV = "csv"


def make_statement(
    books: Books,
    *,
    tenant: str,
    month: Month,
    timezone: Timezone = "UTC",
    breakdown: Breakdown = None,
    format: StatementForm = StatementForm.JSON,  # noqa: A002  as the wire calls it
) -> Document | str:
    """A tenant's month, as JSON or CSV, with an optional breakdown."""
    from billing.reports import statement as statements  # imports the database

    found = statements.statement(books.store, tenant, month, _zone(timezone), breakdown)
    if format is StatementForm.CSV:
        return statements.statement_csv(found)
    return statements.statement_json(found)


def sign_receipt(books: Books, *, tenant: str, request_id: str) -> Document:
    """The signed receipt of one request."""
    from billing.reports.receipts import receipt_for  # imports cryptography

    books.accounts.tenant(tenant)
    return receipt_for(books.store, books.accounts.book, books.signer, tenant, request_id)


def _zone(name: str) -> tzinfo:
    """The zone of this name; `local` is this machine's."""
    return LocalZone() if name == "local" else find_zone(name)
