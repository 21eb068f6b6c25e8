"""/admin/api/tenants, keys, balance and budgets: who is billed, by which keys, and what they have.

Plain functions: the server runs them on its thread pool, because they read and write the ledger's
database. Every change leaves an audit entry in its own transaction. The operations themselves are
in `billing.operations`.
"""

from typing import Annotated

from fastapi import APIRouter, Query, Request

from api.admin.access import MayChange, MayRead
from api.admin.parts import books_of, found
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
def list_tenants(request: Request, _: MayRead) -> list[Document]:
    """Every tenant and what it has."""
    return tenants.list_tenants(books_of(request))


@router.post("/tenants", status_code=201)
def create_tenant(request: Request, body: NewTenant, by: MayChange) -> Document:
    """A new tenant; prepaid unless `credit_limit` says otherwise."""
    return tenants.create_tenant(books_of(request), **body.model_dump(), by=by.name)


@router.get("/tenants/{tenant}")
def show_tenant(request: Request, tenant: str, _: MayRead) -> Document:
    """One tenant, with its projects."""
    with found():
        return tenants.show_tenant(books_of(request), tenant=tenant)


@router.post("/tenants/{tenant}/limit")
def set_credit_limit(request: Request, tenant: str, body: CreditLimit, by: MayChange) -> Document:
    """Set how far below zero a tenant may go."""
    with found():
        return tenants.set_credit_limit(
            books_of(request), tenant=tenant, **body.model_dump(), by=by.name
        )


@router.post("/tenants/{tenant}/rates")
def set_rate_limits(
    request: Request, tenant: str, body: NewRateLimits, by: MayChange
) -> dict[str, int]:
    """Limit a tenant's requests and tokens a minute; gives all limits that were set for it."""
    with found():
        return tenants.set_rate_limits(
            books_of(request), tenant=tenant, **body.model_dump(), by=by.name
        )


@router.post("/tenants/{tenant}/suspend")
def suspend_tenant(request: Request, tenant: str, body: AdminBody, by: MayChange) -> Document:
    """Refuse new requests of a tenant; running ones finish."""
    with found():
        return tenants.suspend_tenant(books_of(request), tenant=tenant, by=by.name, why=body.why)


@router.post("/tenants/{tenant}/resume")
def resume_tenant(request: Request, tenant: str, body: AdminBody, by: MayChange) -> Document:
    """Serve a suspended tenant again."""
    with found():
        return tenants.resume_tenant(books_of(request), tenant=tenant, by=by.name, why=body.why)


@router.post("/tenants/{tenant}/projects", status_code=201)
def create_project(request: Request, tenant: str, body: NewProject, by: MayChange) -> list[str]:
    """A new project, to split a tenant's usage by; gives all of them."""
    with found():
        return tenants.create_project(
            books_of(request), tenant=tenant, **body.model_dump(), by=by.name
        )


@router.get("/keys")
def list_keys(request: Request, _: MayRead, tenant: OfTenant = None) -> list[Document]:
    """Keys by their prefix, never the keys."""
    with found():
        return keys.list_keys(books_of(request), tenant=tenant)


@router.post("/keys", status_code=201)
def create_key(request: Request, body: NewKey, by: MayChange) -> Document:
    """A new key. `key` is in this answer only: it is not kept and cannot be shown again."""
    with found():
        return keys.create_key(books_of(request), **body.model_dump(), by=by.name)


@router.post("/keys/{key_id}/revoke")
def revoke_key(request: Request, key_id: str, body: AdminBody, by: MayChange) -> Document:
    """End a key at once, by its id or its shown prefix."""
    with found():
        return keys.revoke_key(books_of(request), key_id=key_id, by=by.name, why=body.why)


@router.get("/balance/{tenant}")
def show_balance(request: Request, tenant: str, _: MayRead) -> Document:
    """What a tenant has, owes and has on hold."""
    with found():
        return balance.show_balance(books_of(request), tenant=tenant)


@router.post("/balance/{tenant}/adjust")
def adjust_deposit(request: Request, tenant: str, body: Adjustment, by: MayChange) -> Document:
    """Correct a mistyped top-up or grant by an entry of the difference."""
    with found():
        return balance.adjust_deposit(
            books_of(request), tenant=tenant, **body.model_dump(), by=by.name
        )


@router.post("/balance/{tenant}/{kind}")
def book_deposit(
    request: Request, tenant: str, kind: Booking, body: NewDeposit, by: MayChange
) -> Document:
    """Book money: a grant, a top-up, a withdrawal or a chargeback."""
    with found():
        return balance.book_deposit(
            books_of(request), tenant=tenant, kind=kind, **body.model_dump(), by=by.name
        )


@router.get("/budgets")
def list_budgets(request: Request, _: MayRead) -> list[Document]:
    """What tenants, keys, users and tags may spend before an alert."""
    return budgets.list_budgets(books_of(request))


@router.post("/budgets/{name}")
def set_budget(request: Request, name: str, body: NewBudget, by: MayChange) -> Document:
    """Make a budget, or change the one of that name. It stops nothing; it tells."""
    with found():
        return budgets.set_budget(books_of(request), name=name, **body.model_dump(), by=by.name)


@router.post("/budgets/{name}/remove")
def remove_budget(request: Request, name: str, body: AdminBody, by: MayChange) -> list[Document]:
    """Remove a budget; gives those that are left."""
    return budgets.remove_budget(books_of(request), name=name, by=by.name, why=body.why)
