"""/admin/api/tenants, keys, balance and budgets.

Plain functions: the server runs them on its thread pool, because they read and write the ledger's
database. Every change leaves an audit entry in its own transaction. The operations themselves are
in `billing.operations`.
"""

from typing import Annotated

from fastapi import APIRouter, Query

from api.admin.access import Books, MayChange
from api.admin.routes.bodies import (
    Adjustment,
    AdminBody,
    CreditLimit,
    NewBudget,
    NewDeposit,
    NewKey,
    NewProject,
    NewRateLimits,
    NewTenant,
)
from billing.operations import balance, budgets, keys, tenants
from billing.operations.balance import Booking
from billing.reports.documents import Document

router = APIRouter(prefix="/admin/api", tags=["admin: accounts"])

OfTenant = Annotated[str | None, Query(description="Only this tenant")]


@router.get("/tenants")
def list_tenants(books: Books) -> list[Document]:
    """Every tenant and what it has."""
    return tenants.list_tenants(books)


@router.post("/tenants", status_code=201)
def create_tenant(by: MayChange, books: Books, body: NewTenant) -> Document:
    """A new tenant; prepaid unless `credit_limit` says otherwise."""
    return tenants.create_tenant(books, **body.model_dump(), by=by.name)


@router.get("/tenants/{tenant}")
def show_tenant(books: Books, tenant: str) -> Document:
    """One tenant, with its projects."""
    return tenants.show_tenant(books, tenant=tenant)


@router.post("/tenants/{tenant}/limit")
def set_credit_limit(by: MayChange, books: Books, tenant: str, body: CreditLimit) -> Document:
    """Set how far below zero a tenant may go."""
    return tenants.set_credit_limit(books, tenant=tenant, **body.model_dump(), by=by.name)


@router.post("/tenants/{tenant}/rates")
def set_rate_limits(
    by: MayChange, books: Books, tenant: str, body: NewRateLimits
) -> dict[str, int]:
    """Limit a tenant's requests and tokens a minute. Returns all limits set for it."""
    return tenants.set_rate_limits(books, tenant=tenant, **body.model_dump(), by=by.name)


@router.post("/tenants/{tenant}/suspend")
def suspend_tenant(by: MayChange, books: Books, tenant: str, body: AdminBody) -> Document:
    """Refuse new requests of a tenant; running ones finish."""
    return tenants.suspend_tenant(books, tenant=tenant, by=by.name, why=body.why)


@router.post("/tenants/{tenant}/resume")
def resume_tenant(by: MayChange, books: Books, tenant: str, body: AdminBody) -> Document:
    """Serve a suspended tenant again."""
    return tenants.resume_tenant(books, tenant=tenant, by=by.name, why=body.why)


@router.post("/tenants/{tenant}/projects", status_code=201)
def create_project(by: MayChange, books: Books, tenant: str, body: NewProject) -> list[str]:
    """A new project, to split a tenant's usage by. Returns all projects of the tenant."""
    return tenants.create_project(books, tenant=tenant, **body.model_dump(), by=by.name)


@router.get("/keys")
def list_keys(books: Books, tenant: OfTenant = None) -> list[Document]:
    """Keys, shown by their prefixes only."""
    return keys.list_keys(books, tenant=tenant)


@router.post("/keys", status_code=201)
def create_key(by: MayChange, books: Books, body: NewKey) -> Document:
    """A new key. `key` is in this answer only: it is not stored and cannot be shown again."""
    return keys.create_key(books, **body.model_dump(), by=by.name)


@router.post("/keys/{key_id}/revoke")
def revoke_key(by: MayChange, books: Books, key_id: str, body: AdminBody) -> Document:
    """Revoke a key at once, by its id or its prefix."""
    return keys.revoke_key(books, key_id=key_id, by=by.name, why=body.why)


@router.get("/balance/{tenant}")
def show_balance(books: Books, tenant: str) -> Document:
    """What a tenant has, owes and has on hold."""
    return balance.show_balance(books, tenant=tenant)


@router.post("/balance/{tenant}/adjust")
def adjust_deposit(by: MayChange, books: Books, tenant: str, body: Adjustment) -> Document:
    """Correct a mistyped top-up or grant with an entry for the difference."""
    return balance.adjust_deposit(books, tenant=tenant, **body.model_dump(), by=by.name)


@router.post("/balance/{tenant}/{kind}")
def book_deposit(
    by: MayChange, books: Books, tenant: str, kind: Booking, body: NewDeposit
) -> Document:
    """Book money: a grant, a top-up, a withdrawal or a chargeback."""
    return balance.book_deposit(books, tenant=tenant, kind=kind, **body.model_dump(), by=by.name)


@router.get("/budgets")
def list_budgets(books: Books) -> list[Document]:
    """The budgets of tenants, keys, users and tags."""
    return budgets.list_budgets(books)


@router.post("/budgets/{name}")
def set_budget(by: MayChange, books: Books, name: str, body: NewBudget) -> Document:
    """Create or change a budget. A budget alerts; it stops no request."""
    return budgets.set_budget(books, name=name, **body.model_dump(), by=by.name)


@router.post("/budgets/{name}/remove")
def remove_budget(by: MayChange, books: Books, name: str, body: AdminBody) -> list[Document]:
    """Remove a budget. Returns the remaining ones."""
    return budgets.remove_budget(books, name=name, by=by.name, why=body.why)
