"""Tenants, their balances and their history, and keys: /admin/tenants and /admin/keys.

Plain functions: the server runs them on its thread pool, because they read the ledger's database.
"""

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterable

from anyio import from_thread
from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admin.access import MayRead
from api.admin.pages.base import render
from api.admin.pages.filters import Before, Filter
from api.admin.parts import books_of, found, parts_of
from api.journal.journal import Failure
from billing.operations.budgets import list_budgets
from billing.operations.keys import USUAL_SCOPES, keys_of
from billing.reports import usage as usage_report
from billing.reports.documents import entry_document
from billing.reports.standing import standing
from billing.reports.usage import Unit, parse_query, report
from billing.store import reports as store_reports
from billing.tenants import Tenant
from tiers.tier import TierName

router = APIRouter(prefix="/admin", include_in_schema=False)

ENTRIES = 25  # of a tenant's ledger on one page
DAYS = 31
_LIMITS = {
    "requests": "Requests a minute",
    "miss_tokens": "Computed tokens a minute",
    "output_tokens": "Output tokens a minute",
    "concurrency": "Requests at once",
}
LIMITS = _LIMITS | {f"user_{name}": f"{words}, each end user" for name, words in _LIMITS.items()}


@router.get("/tenants")
def tenants_page(request: Request, admin: MayRead, q: Filter = "") -> Response:
    books = books_of(request)
    used = {period.tenant: period for period in usage_report.total(books.store)}
    tenants = [each for each in books.accounts.tenants() if q.strip() in each.tenant]
    room = from_thread.run(_room_of, request) if parts_of(request).explorer.has_blocks else {}
    return render(
        request,
        "tenants.html",
        admin,
        tenants=[(each, used.get(each.tenant), room.get(each.tenant, {})) for each in tenants],
        tiers=[tier for tier in TierName if any(tier in each for each in room.values())],
        states=_states(request, tenants),
        currencies=books.accounts.currencies(),
        q=q,
    )


async def _room_of(request: Request) -> dict[str, Counter[TierName]]:
    """Bytes of each tenant in each tier, over all models."""
    parts, room = parts_of(request), defaultdict[str, Counter[TierName]](Counter)
    for each in await parts.explorer.room(await parts.blocks()):
        room[each["owner"]].update(each["bytes"])
    return room


@router.get("/tenants/{tenant}")
def tenant_page(request: Request, tenant: str, admin: MayRead, before: Before = None) -> Response:
    books, now_ns = books_of(request), time.time_ns()
    with found():
        account = books.accounts.tenant(tenant)
    with books.store.reading() as connection:
        entries = store_reports.last_entries(connection, tenant, ENTRIES + 1, before)
    return render(
        request,
        "tenant.html",
        admin,
        tenant=account,
        state=_states(request, [account])[tenant],
        currencies=books.accounts.currencies(tenant),
        standing=standing(books.store, tenant, now_ns),
        keys=keys_of(books, tenant),
        entries=[entry_document(entry) for entry in entries[:ENTRIES]],
        older=entries[ENTRIES - 1].seq if len(entries) > ENTRIES else None,
        newest=before is None,
        days=report(books.store, parse_query(tenant=tenant, since=f"{DAYS - 1}d"), Unit.DAY),
        months=report(books.store, parse_query(tenant=tenant), Unit.MONTH),
        budgets=[budget for budget in list_budgets(books) if budget["tenant"] == tenant],
        limits=_limits(request, tenant),
        once=secrets.token_hex(8),
    )


@router.get("/keys")
def key_page(request: Request, admin: MayRead, tenant: Filter = "", state: Filter = "") -> Response:
    books = books_of(request)
    keys = keys_of(books, tenant or None)
    return render(
        request,
        "keys.html",
        admin,
        keys=[each for each in keys if state in ("", each["state"])],
        tenants=[each.tenant for each in books.accounts.tenants()],
        scopes=USUAL_SCOPES,
        tenant=tenant,
        state=state,
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
