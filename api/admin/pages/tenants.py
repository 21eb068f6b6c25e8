"""Tenants, their balances and their history: pages under /admin/tenants.

Forms over `billing.operations`. Plain functions: the server runs them on its thread pool, because
they read and write the ledger's database.
"""

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from anyio import from_thread
from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from api.admin.access import MayChange, MayRead
from api.admin.login.sessions import Admin
from api.admin.pages.base import render
from api.admin.pages.explorer import room_of
from api.admin.pages.filters import Before, Filter
from api.admin.pages.operation_forms import DONE, FORMS, Sent
from api.admin.parts import books_of, found, parts_of
from api.admin.routes.operation_table import LIMITS
from api.errors import InvalidRequest, RecordNotFound
from api.journal.journal import Failure
from billing.operations.books import Books
from billing.operations.budgets import list_budgets
from billing.operations.keys import keys_of
from billing.reports import usage as usage_report
from billing.reports.documents import entry_document
from billing.reports.standing import standing
from billing.reports.usage import Unit, parse_query, report
from billing.store import reports as store_reports
from billing.tenants import Tenant
from tiers.tier import TierName

router = APIRouter(prefix="/admin", include_in_schema=False)

ENTRIES = 25  # of a tenant's ledger on one page
ON_PAGE = (
    *("deposit", "adjust", "currency", "limit", "rates", "suspend", "resume"),
    *("budget", "unbudget"),
)
DAYS = 31


@router.get("/tenants")
def tenants_page(request: Request, admin: MayRead, q: Filter = "", done: Filter = "") -> Response:
    return _tenants(request, admin, q=q, done=done)


@router.post("/tenants")
def create_tenant(request: Request, admin: MayChange, sent: Sent) -> Response:
    wrong, made = FORMS["tenant"].submit(request, admin, sent)
    if wrong:
        return _tenants(request, admin, wrong=wrong)
    return RedirectResponse(f"/admin/tenants/{made['tenant']}?done=tenant", 303)


@router.get("/tenants/{tenant}")
def tenant_page(
    request: Request,
    tenant: str,
    admin: MayRead,
    before: Before = None,
    done: Filter = "",
) -> Response:
    return show_tenant(request, admin, tenant, before=before, done=done)


@router.post("/tenants/{tenant}/{name}")
def submit_form(request: Request, tenant: str, name: str, admin: MayChange, sent: Sent) -> Response:
    """Carry out a form of the tenant's page, and return to it."""
    if name not in ON_PAGE:
        raise RecordNotFound(f"a tenant's page has no form {name!r}")

    def check(books: Books, typed: Mapping[str, Any]) -> None:
        _refuse_of_others(books, tenant, typed)

    wrong, _ = FORMS[name].submit(request, admin, sent, check, tenant=tenant)
    if wrong:
        return show_tenant(
            request, admin, tenant, wrong=wrong, typed=sent if name == "deposit" else None
        )
    return RedirectResponse(f"/admin/tenants/{tenant}?done={name}", 303)


def _refuse_of_others(books: Books, tenant: str, typed: Mapping[str, Any]) -> None:
    """Raise InvalidRequest if a budget of this name is another tenant's."""
    for each in list_budgets(books) if "name" in typed else ():
        if each["name"] == typed["name"] and each["tenant"] != tenant:
            raise InvalidRequest(
                f"budget {typed['name']!r} is another tenant's; choose another name"
            )


def _tenants(
    request: Request, admin: Admin, *, q: str = "", wrong: str = "", done: str = ""
) -> Response:
    books = books_of(request)
    used = {period.tenant: period for period in usage_report.total(books.store)}
    tenants = [each for each in books.accounts.tenants() if q.strip() in each.tenant]
    room = from_thread.run(_room_of, request)
    return render(
        request,
        "tenants.html",
        admin,
        tenants=[(each, used.get(each.tenant), room.get(each.tenant, {})) for each in tenants],
        tiers=[tier for tier in TierName if any(tier in each for each in room.values())],
        form=FORMS["tenant"],
        states=_states(request, tenants),
        currencies=books.accounts.currencies(),
        q=q,
        wrong=wrong,
        done=DONE.get(done, ""),
    )


async def _room_of(request: Request) -> dict[str, Counter[TierName]]:
    """Bytes of each tenant in each tier, over all models."""
    room: dict[str, Counter[TierName]] = {}
    for each in await room_of(request):
        room.setdefault(each.owner, Counter()).update(each.num_bytes)
    return room


def show_tenant(
    request: Request,
    admin: Admin,
    name: str,
    *,
    before: int | None = None,
    wrong: str = "",
    typed: Mapping[str, object] | None = None,
    done: str = "",
) -> Response:
    """`typed` is what a refused deposit had in its fields."""
    books, now_ns = books_of(request), time.time_ns()
    with found():
        tenant = books.accounts.tenant(name)
    with books.store.reading() as connection:
        entries = store_reports.last_entries(connection, name, ENTRIES + 1, before)
    keys = keys_of(books, name)
    return render(
        request,
        "tenant.html",
        admin,
        tenant=tenant,
        state=_states(request, [tenant])[name],
        currencies=books.accounts.currencies(name),
        standing=standing(books.store, name, now_ns),
        keys=keys,
        entries=[entry_document(entry) for entry in entries[:ENTRIES]],
        older=entries[ENTRIES - 1].seq if len(entries) > ENTRIES else None,
        newest=before is None,
        days=report(books.store, parse_query(tenant=name, since=f"{DAYS - 1}d"), Unit.DAY),
        months=report(books.store, parse_query(tenant=name), Unit.MONTH),
        budgets=[budget for budget in list_budgets(books) if budget["tenant"] == name],
        limits=_limits(request, name),
        forms=FORMS,
        once=secrets.token_hex(8),
        wrong=wrong,
        typed=typed or {},
        done=DONE.get(done, ""),
    )


def _states(request: Request, tenants: Iterable[Tenant]) -> dict[str, tuple[str, str]]:
    """Each tenant's state in words, and why, from its account and its last request."""
    refusals, states = from_thread.run(_last_refusals, request), {}
    for each in tenants:
        why = refusals.get(each.tenant, "")
        state = "refused, 402" if why else "served"
        if each.suspended or each.is_out_of_money:
            state = "suspended" if each.suspended else "out of money"
        states[each.tenant] = state, why
    return states


async def _last_refusals(request: Request) -> dict[str, str]:
    """The tenants whose last request was refused with 402, each with what it was told."""
    last: dict[str, Failure | None] = {}
    for record in parts_of(request).journal.newest():
        if record.ended_s:
            last.setdefault(record.tenant, record.failure)
    return {name: each.message for name, each in last.items() if each and each.status == 402}


def _limits(request: Request, tenant: str) -> list[tuple[str, str, int | None, int | None]]:
    """Each limit: its name, its label, the value in force, and the value an admin set."""
    limits, overrides = parts_of(request).limits, books_of(request).accounts.rate_limits(tenant)
    quota = limits.of_tenant(tenant, overrides)
    return [
        (name, words, getattr(quota, name, overrides.get(name)), overrides.get(name))
        for name, words in LIMITS.items()
    ]
