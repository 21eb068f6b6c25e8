"""Tenants and their projects."""

import time
from collections.abc import Mapping
from typing import Annotated

from billing.errors import InvalidAmount
from billing.money import check_currency, parse_amount
from billing.operations.arguments import Amount, Argument, Name, Why, text
from billing.operations.books import Books
from billing.reports.documents import Document, tenant_document
from billing.tenants import MAX_RATE_LIMIT, RATE_LIMITS


def list_tenants(books: Books) -> list[Document]:
    """All tenants, each with its balance, credit limit and state."""
    return [tenant_document(tenant) for tenant in books.accounts.tenants()]


def show_tenant(books: Books, *, tenant: str) -> Document:
    """One tenant, with its projects, and what is left of its grants and limits."""
    from billing.reports.standing import standing  # imports the database

    found = tenant_document(books.accounts.tenant(tenant))
    found["rate_limits"] = dict(books.accounts.rate_limits(tenant))
    more = standing(books.store, tenant, time.time_ns())
    return found | {"projects": books.accounts.projects(tenant)} | more


def create_tenant(
    books: Books,
    *,
    tenant: Name,
    currency: Annotated[
        str | None, Argument("That of a rate card; without it, the newest card's")
    ] = None,
    credit_limit: Annotated[
        Amount | None,
        Argument("0 is prepaid, an amount is postpaid up to it, null is unlimited"),
    ] = "0",
    by: str,
    why: Why,
) -> Document:
    """A new tenant; prepaid unless `credit_limit` says otherwise."""
    made = books.accounts.create_tenant(
        tenant,
        _priced(books, tenant, currency),
        credit_limit=_units(credit_limit),
        by=by,
        reason=why,
    )
    return tenant_document(made)


def set_currency(
    books: Books,
    *,
    tenant: str,
    currency: Annotated[str, Argument("That of a rate card")],
    by: str,
    why: Why,
) -> Document:
    """Charge a tenant in another currency, while nothing is booked. The credit limit keeps its
    number."""
    priced = _priced(books, tenant, currency)
    return tenant_document(books.accounts.set_currency(tenant, priced, by=by, reason=why))


def set_credit_limit(
    books: Books,
    *,
    tenant: str,
    credit_limit: Annotated[Amount | None, Argument("0 is prepaid, null is unlimited")],
    by: str,
    why: Why,
) -> Document:
    """Set how far below zero a tenant may go."""
    limit = _units(credit_limit)
    return tenant_document(books.accounts.set_credit_limit(tenant, limit, by=by, reason=why))


def set_rate_limits(
    books: Books,
    *,
    tenant: str,
    limits: Annotated[
        Mapping[
            Annotated[str, text(32)],
            Annotated[int, Argument(ge=0, le=MAX_RATE_LIMIT)] | None,
        ],
        Argument(
            "requests, miss_tokens and output_tokens a minute, and concurrency; with user_ before "
            "it, of each end user; 0 is no limit, null is as the settings say, what is not named "
            "stays",
            min_length=1,
            max_length=len(RATE_LIMITS),
        ),
    ],
    by: str,
    why: Why,
) -> dict[str, int]:
    """Limit a tenant's requests and tokens a minute. Returns all limits set for it."""
    return dict(books.accounts.set_rate_limits(tenant, limits, by=by, reason=why))


def suspend_tenant(books: Books, *, tenant: str, by: str, why: Why) -> Document:
    """Refuse new requests of a tenant; running ones finish."""
    return tenant_document(books.accounts.set_suspended(tenant, True, by=by, reason=why))


def resume_tenant(books: Books, *, tenant: str, by: str, why: Why) -> Document:
    """Serve a suspended tenant again."""
    return tenant_document(books.accounts.set_suspended(tenant, False, by=by, reason=why))


def create_project(books: Books, *, tenant: str, project: Name, by: str, why: Why) -> list[str]:
    """A new project, to split a tenant's usage by. Returns all projects of the tenant."""
    books.accounts.create_project(tenant, project, by=by, reason=why)
    return books.accounts.projects(tenant)


def _priced(books: Books, tenant: str, currency: str | None) -> str:
    """The currency, or the usual one. Refused without a card: each request would be, too."""
    known = books.accounts.currencies(tenant)
    if currency is None and known:
        return known[0]
    if check_currency(currency or "") not in known:
        raise InvalidAmount(
            f"no rate card in {currency} prices requests of {tenant!r}, so all would be refused; "
            f"apply one with `cachesvc prices apply FILE`, or take {' or '.join(known)}"
        )
    return currency or ""


def _units(credit_limit: str | None) -> int | None:
    return None if credit_limit is None else parse_amount(credit_limit)
