"""The money page: revenue, savings, balances, holds, the proof, and the prices.

Plain functions: the server runs them on its thread pool, because they read the ledger's database.
"""

import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from api.admin.access import MayRead
from api.admin.pages.base import render
from api.admin.parts import books_of
from billing.operations.books import Books
from billing.prices.book import RateCard
from billing.reports import usage as usage_report
from billing.reports.documents import RATES, card_document, hold_document, proof_document
from billing.reports.revenue import REVENUE_CLASSES, Revenue, ranked, revenue
from billing.store import reports as store_reports

router = APIRouter(prefix="/admin", include_in_schema=False)

DAYS = 31
MAX_HOLDS = 50


@router.get("/money")
def page(request: Request, admin: MayRead) -> Response:
    books, now_ns = books_of(request), time.time_ns()
    with books.store.reading() as connection:
        holds = [hold_document(hold, now_ns) for hold in store_reports.hold_list(connection, None)]
    book, proved = books.accounts.book, books.prover.last
    days = revenue(books.store, book, days=DAYS)
    card, month = book.in_force(now_ns), _sums(days)
    return render(
        request,
        "money.html",
        admin,
        currency=_main_currency(month) or (card.currency if card is not None else ""),
        days=days,
        classes=[name for name in REVENUE_CLASSES if any(day.amounts[name] for day in days)],
        peak=max((max(day.charged, day.saved) for day in days), default=0),
        month=month,
        tenants=books.accounts.tenants(),
        ranked=ranked(usage_report.total(books.store)),
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


def _sums(days: list[Revenue]) -> dict[str, dict[str, Any]]:
    """The totals of all these days, by currency."""
    sums: dict[str, dict[str, Any]] = {}
    for day in days:
        total = sums.setdefault(
            day.currency, {"charged": 0, "saved": 0, "requests": 0} | dict.fromkeys(day.amounts, 0)
        )
        total["charged"] += day.charged
        total["saved"] += day.saved
        total["requests"] += day.requests
        for name, amount in day.amounts.items():
            total[name] += amount
    return sums


def _main_currency(month: Mapping[str, Mapping[str, int]]) -> str:
    """The one that most requests were charged in, because the charts show one; empty if none
    was."""
    return max(month, key=lambda code: month[code]["requests"], default="")


def _cards(books: Books, now_ns: int) -> list[dict[str, Any]]:
    """Every card, the one in force first, with its current and next price windows."""
    book = books.accounts.book
    rows = [
        _card(card, card is book.in_force(now_ns, card.currency), now_ns) for card in book.cards
    ]
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
