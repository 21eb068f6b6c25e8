"""The money page: revenue, savings, balances, holds, the proof, and the prices. And the audit log:
who changed what, before and after, and why.

Plain functions: the server runs them on its thread pool, because they read the ledger's database.
"""

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from api.admin.access import MayRead
from api.admin.pages.base import render
from api.admin.pages.filters import Asked, Before, Filter
from api.admin.parts import books_of, parts_of
from billing.operations.books import Books
from billing.prices.book import RateCard
from billing.reports.documents import (
    RATES,
    card_document,
    hold_document,
    proof_document,
    trail_document,
)
from billing.reports.revenue import REVENUE_CLASSES, Revenue, revenue
from billing.store import reports as store_reports

router = APIRouter(prefix="/admin", include_in_schema=False)

DAYS = 31
MAX_HOLDS = 50
MAX_ENTRIES = 50


@router.get("/money")
def page(request: Request, admin: MayRead, chosen: Asked) -> Response:
    books, now_ns = books_of(request), time.time_ns()
    with books.store.reading() as connection:
        holds = [hold_document(hold, now_ns) for hold in store_reports.hold_list(connection, None)]
        models = store_reports.models_of(connection)
    holds = [each for each in holds if chosen.takes(each["tenant"], each["key"], each["model"])]
    proved, tenants = books.prover.last, books.accounts.tenants()
    first, last = chosen.days(DAYS)
    days, ranked = revenue(
        books.store,
        books.accounts.book,
        first,
        last,
        lambda row: chosen.takes(row["tenant"], row["key_id"], row["model"]),
    )
    return render(
        request,
        "money.html",
        admin,
        chosen=chosen,
        choices={
            "tenant": [each.tenant for each in tenants],
            "key": [each.key_id for each in books.accounts.keys(None)],
            "model": models,
        },
        currencies=parts_of(request).currencies(),
        currency_of={each.tenant: each.currency for each in tenants},
        first=first,
        last=last,
        days=days,
        classes=[name for name in REVENUE_CLASSES if any(day.amounts[name] for day in days)],
        month=_sums(days),
        tenants=[each for each in tenants if chosen.tenant in ("", each.tenant)],
        ranked=ranked,
        holds=sorted(holds, key=lambda hold: -float(hold["age_s"]))[:MAX_HOLDS],
        num_holds=len(holds),
        proof=None if proved is None else proof_document(proved.proof, proved.took_s),
        proved_ns=None if proved is None else proved.at_ns,
        cards=_cards(books, now_ns),
        rates=RATES,
        now_ns=now_ns,
    )


@router.post("/money/verify")
def verify(request: Request, _: MayRead) -> Response:
    """Prove the whole ledger now. Changes nothing."""
    books_of(request).prover.prove()
    return RedirectResponse("/admin/money#proof", 303)


@router.get("/audit")
def audit_page(
    request: Request,
    admin: MayRead,
    actor: Filter = "",
    action: Filter = "",
    q: Filter = "",
    before: Before = None,
) -> Response:
    """The newest entries first. `before` is the number of the oldest entry already seen."""
    accounts = books_of(request).accounts
    rows = accounts.trail.newest(
        MAX_ENTRIES + 1, before=before, actor=actor, action=action, text=q.strip()
    )
    return render(
        request,
        "audit.html",
        admin,
        entries=[trail_document(row) for row in rows[:MAX_ENTRIES]],
        older=rows[MAX_ENTRIES - 1]["seq"] if len(rows) > MAX_ENTRIES else None,
        actor=actor,
        action=action,
        q=q,
        before=before,
        actions=accounts.trail.actions(),
    )


def _sums(days: list[Revenue]) -> dict[str, dict[str, Any]]:
    """The totals of all these days, by currency; `peak` is the highest day."""
    sums: dict[str, dict[str, Any]] = {}
    for day in days:
        total = sums.setdefault(
            day.currency, dict.fromkeys(("charged", "saved", "requests", "peak", *day.amounts), 0)
        )
        total["peak"] = max(total["peak"], day.charged)
        total["charged"] += day.charged
        total["saved"] += day.saved
        total["requests"] += day.requests
        for name, amount in day.amounts.items():
            total[name] += amount
    return sums


def _cards(books: Books, now_ns: int) -> list[dict[str, Any]]:
    """Every card, the one in force first, with its current and next price windows."""
    book = books.accounts.book
    rows = [_card(one, one is book.in_force(now_ns, one.currency), now_ns) for one in book.cards]
    return sorted(rows, key=lambda card: (not card["in_force"], -card["valid_from_ns"]))


def _card(card: RateCard, in_force: bool, now_ns: int) -> dict[str, Any]:
    following = card.next_window(now_ns)
    return card_document(card) | {
        "in_force": in_force,
        "to_come": card.valid_from_ns > now_ns,
        "window": card.window_at(now_ns),
        "next_ns": following[0] if following is not None else None,
        "next_window": following[1] if following is not None else None,
    }
