"""/admin/api/tenants, keys and balance: who is billed, with which keys, and what they have.

The same operations and documents as `cachesvc tenants|keys|balance`. Plain functions: the server
runs them on its thread pool, for they read and write the ledger's database. Every change leaves an
audit entry in its own transaction.
"""

import secrets
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from api.admin.access import MayChange, MayRead
from api.admin.parts import books_of, found
from api.admin.routes.bodies import (
    Adjustment,
    AdminBody,
    CreditLimit,
    NewDeposit,
    NewKey,
    NewProject,
    NewTenant,
)
from billing.keys import Scope
from billing.money import parse_amount, parse_not_negative, parse_positive
from billing.prices.book import NS
from billing.reports.documents import Document, key_document, tenant_document

router = APIRouter(prefix="/admin/api", tags=["admin: accounts"])

OfTenant = Annotated[str | None, Query(description="Only this tenant")]


@router.get("/tenants")
def tenants(request: Request, _: MayRead) -> list[Document]:
    """Every tenant and what it has."""
    return [tenant_document(tenant) for tenant in books_of(request).accounts.tenants()]


@router.post("/tenants", status_code=201)
def create_tenant(request: Request, body: NewTenant, by: MayChange) -> Document:
    """A new tenant; prepaid unless `credit_limit` says otherwise."""
    accounts = books_of(request).accounts
    made = accounts.create_tenant(
        body.tenant,
        body.currency or accounts.usual_currency,
        credit_limit=_limit(body.credit_limit),
        by=by.name,
        reason=body.why,
    )
    return tenant_document(made)


@router.get("/tenants/{tenant}")
def show_tenant(request: Request, tenant: str, _: MayRead) -> Document:
    """One tenant, with its projects."""
    accounts = books_of(request).accounts
    with found():
        return tenant_document(accounts.tenant(tenant)) | {"projects": accounts.projects(tenant)}


@router.post("/tenants/{tenant}/limit")
def limit_tenant(request: Request, tenant: str, body: CreditLimit, by: MayChange) -> Document:
    """Set how far below zero a tenant may go."""
    limit = _limit(body.credit_limit)
    with found():
        return tenant_document(
            books_of(request).accounts.set_credit_limit(tenant, limit, by=by.name, reason=body.why)
        )


@router.post("/tenants/{tenant}/suspend")
def suspend_tenant(request: Request, tenant: str, body: AdminBody, by: MayChange) -> Document:
    """Refuse new requests of a tenant; running ones end as they would."""
    return _suspended(request, tenant, True, by.name, body.why)


@router.post("/tenants/{tenant}/resume")
def resume_tenant(request: Request, tenant: str, body: AdminBody, by: MayChange) -> Document:
    """Serve a suspended tenant again."""
    return _suspended(request, tenant, False, by.name, body.why)


@router.post("/tenants/{tenant}/projects", status_code=201)
def create_project(request: Request, tenant: str, body: NewProject, by: MayChange) -> list[str]:
    """A new project, to split a tenant's usage by; gives all of them."""
    accounts = books_of(request).accounts
    with found():
        accounts.create_project(tenant, body.project, by=by.name, reason=body.why)
    return accounts.projects(tenant)


@router.get("/keys")
def keys(request: Request, _: MayRead, tenant: OfTenant = None) -> list[Document]:
    """Keys by their prefix, never the keys."""
    accounts, now_ns = books_of(request).accounts, time.time_ns()
    with found():
        accounts.expect(tenant)
    return [key_document(info, now_ns) for info in accounts.keys(tenant)]


@router.post("/keys", status_code=201)
def create_key(request: Request, body: NewKey, by: MayChange) -> Document:
    """A new key. `key` is in this answer only: it is not kept and cannot be shown again."""
    now_ns = time.time_ns()
    with found():
        key, info = books_of(request).accounts.create_key(
            body.tenant,
            project=body.project,
            name=body.name,
            scopes=frozenset(map(Scope, body.scopes)),
            expires_ns=None if body.expires_in_s is None else now_ns + body.expires_in_s * NS,
            by=by.name,
            reason=body.why,
        )
    return {"key": key, **key_document(info, now_ns)}


@router.post("/keys/{key_id}/revoke")
def revoke_key(request: Request, key_id: str, body: AdminBody, by: MayChange) -> Document:
    """End a key at once, by its id or its shown prefix."""
    with found():
        info = books_of(request).accounts.revoke_key(key_id, by=by.name, reason=body.why)
    return key_document(info, time.time_ns())


@router.get("/balance/{tenant}")
def show_balance(request: Request, tenant: str, _: MayRead) -> Document:
    """What a tenant has, owes and has on hold."""
    with found():
        return tenant_document(books_of(request).accounts.tenant(tenant))


@router.post("/balance/{tenant}/grant")
def grant(request: Request, tenant: str, body: NewDeposit, by: MayChange) -> Document:
    """Give promotional money; it is spent before paid money."""
    return _deposit(request, "grant", tenant, body, by.name)


@router.post("/balance/{tenant}/topup")
def top_up(request: Request, tenant: str, body: NewDeposit, by: MayChange) -> Document:
    """Book money that was paid; what is owed is settled first."""
    return _deposit(request, "topup", tenant, body, by.name)


@router.post("/balance/{tenant}/withdraw")
def withdraw(request: Request, tenant: str, body: NewDeposit, by: MayChange) -> Document:
    """Book paid money that was paid out again; no more than is neither spent nor on hold."""
    return _deposit(request, "withdraw", tenant, body, by.name)


@router.post("/balance/{tenant}/chargeback")
def charge_back(request: Request, tenant: str, body: NewDeposit, by: MayChange) -> Document:
    """Book a payment that the payer's bank took back; what was spent of it is owed."""
    return _deposit(request, "chargeback", tenant, body, by.name)


@router.post("/balance/{tenant}/adjust")
def adjust(request: Request, tenant: str, body: Adjustment, by: MayChange) -> Document:
    """Put a mistyped top-up or grant right by an entry of the difference."""
    books = books_of(request)
    units = parse_not_negative(body.amount)
    reference = body.reference or f"adjust_{secrets.token_hex(8)}"
    with found():
        books.ledger.adjust(
            tenant, body.deposit, units, reference=reference, by=by.name, reason=body.why
        ).result()
        return tenant_document(books.accounts.tenant(tenant))


def _deposit(request: Request, kind: str, tenant: str, body: NewDeposit, by: str) -> Document:
    books = books_of(request)
    units = parse_positive(body.amount)
    reference = body.reference or f"{kind}_{secrets.token_hex(8)}"
    book: Any = {
        "grant": books.ledger.grant,
        "topup": books.ledger.deposit,
        "withdraw": books.ledger.withdraw,
        "chargeback": books.ledger.charge_back,
    }[kind]
    with found():
        book(tenant, units, reference=reference, by=by, reason=body.why).result()
        return tenant_document(books.accounts.tenant(tenant))


def _suspended(request: Request, tenant: str, suspended: bool, by: str, why: str) -> Document:
    with found():
        return tenant_document(
            books_of(request).accounts.set_suspended(tenant, suspended, by=by, reason=why)
        )


def _limit(text: str | None) -> int | None:
    """Units of a credit limit; None is unlimited."""
    return None if text is None else parse_amount(text)
