"""Budgets: what tenants, keys, users and tags may spend before an alert."""

import time

from billing.alerts import budgets as alerts
from billing.alerts.budgets import Budget, BudgetSpan, Of
from billing.money import format_units, parse_positive
from billing.operations.books import Books
from billing.reports.documents import Document

USUAL_A_DAY = 3  # top-ups


def list_budgets(books: Books) -> list[Document]:
    """Every budget, by name."""
    return [_document(budget) for budget in alerts.all_budgets(books.store)]


def set_budget(
    books: Books,
    *,
    name: str,
    tenant: str,
    amount: str,
    per: BudgetSpan = BudgetSpan.MONTH,
    of: Of = Of.TENANT,
    value: str = "",
    ask: str = "",
    most: int = 0,
    by: str,
    why: str,
) -> Document:
    """Creates a budget, or changes the one of that name.

    A top-up budget requests `ask` when the balance falls below it, at most `most` times a day (3).
    """
    budget = Budget(
        name=name,
        tenant=tenant,
        amount=parse_positive(amount),
        span=per,
        of=of,
        value=value,
        ask=parse_positive(ask) if ask else 0,
        most=(most or USUAL_A_DAY) if ask else most,
    )
    alerts.set_budget(books.accounts, budget, by=by, now_ns=time.time_ns(), reason=why)
    return _document(budget)


def remove_budget(books: Books, *, name: str, by: str, why: str) -> list[Document]:
    """Removes a budget. Returns the remaining ones."""
    alerts.remove_budget(books.store, name, by=by, now_ns=time.time_ns(), reason=why)
    return list_budgets(books)


def _document(budget: Budget) -> Document:
    return {
        "name": budget.name,
        "tenant": budget.tenant,
        "amount": format_units(budget.amount),
        "per": budget.span.value,
        "of": budget.of.value,
        "value": budget.value,
        "ask": format_units(budget.ask) if budget.ask else "",
        "most": budget.most,
    }
