"""Tenants and their projects."""

import time
from collections.abc import Mapping

from billing.money import parse_amount
from billing.operations.books import Books
from billing.reports.documents import Document, tenant_document


def list_tenants(books: Books) -> list[Document]:
    """Every tenant with its balance."""
    return [tenant_document(tenant) for tenant in books.accounts.tenants()]


def show_tenant(books: Books, *, tenant: str) -> Document:
    """One tenant, with its projects, what is left of its grants, and its plan."""
    from billing.reports.plans import standing  # imports the database

    found = tenant_document(books.accounts.tenant(tenant))
    found["rate_limits"] = dict(books.accounts.rate_limits(tenant))
    more = standing(books.store, tenant, time.time_ns())
    return found | {"projects": books.accounts.projects(tenant)} | more


def create_tenant(
    books: Books,
    *,
    tenant: str,
    currency: str | None = None,
    credit_limit: str | None = "0",
    by: str,
    why: str,
) -> Document:
    """A new tenant, in the currency of the newest card unless another is named.

    A `credit_limit` of 0 is prepaid, an amount is postpaid up to it, None is unlimited.
    """
    accounts = books.accounts
    made = accounts.create_tenant(
        tenant,
        currency or accounts.usual_currency,
        credit_limit=_units(credit_limit),
        by=by,
        reason=why,
    )
    return tenant_document(made)


def set_credit_limit(
    books: Books, *, tenant: str, credit_limit: str | None, by: str, why: str
) -> Document:
    """Sets how far below zero a tenant may go; None is unlimited."""
    limit = _units(credit_limit)
    return tenant_document(books.accounts.set_credit_limit(tenant, limit, by=by, reason=why))


def set_rate_limits(
    books: Books, *, tenant: str, limits: Mapping[str, int | None], by: str, why: str
) -> Document:
    """Changes a tenant's limits: requests, miss_tokens or output_tokens a minute, concurrency.

    0 is no limit, None returns to the settings' limit. Limits that are not named stay.
    """
    return dict(books.accounts.set_rate_limits(tenant, limits, by=by, reason=why))


def suspend_tenant(books: Books, *, tenant: str, by: str, why: str) -> Document:
    """Refuse new requests of a tenant; running ones finish."""
    return tenant_document(books.accounts.set_suspended(tenant, True, by=by, reason=why))


def resume_tenant(books: Books, *, tenant: str, by: str, why: str) -> Document:
    """Resumes a suspended tenant."""
    return tenant_document(books.accounts.set_suspended(tenant, False, by=by, reason=why))


def create_project(books: Books, *, tenant: str, project: str, by: str, why: str) -> list[str]:
    """A new project, to split a tenant's usage by. Returns all projects of the tenant."""
    books.accounts.create_project(tenant, project, by=by, reason=why)
    return books.accounts.projects(tenant)


def _units(credit_limit: str | None) -> int | None:
    return None if credit_limit is None else parse_amount(credit_limit)
