"""Budgets: what tenants, keys, users and tags may spend before an alert or a refusal."""

import time
from typing import Annotated, Literal

from billing.alerts import budgets as alerts
from billing.alerts.budgets import Budget, BudgetSpan, Of
from billing.money import format_units, parse_positive
from billing.operations.arguments import Amount, Argument, Name, Why, text
from billing.operations.books import Books
from billing.reports.documents import Document
from billing.reports.limits import limit_state
from billing.store import limits as store_limits

USUAL_A_DAY = 3  # top-ups


def list_budgets(books: Books) -> list[Document]:
    """The budgets of tenants, keys, users and tags, by name.

    A hard one says what its period has charged, holds and leaves; for each key or user, of the one
    that spent most.
    """
    now_ns = time.time_ns()
    with books.store.reading() as connection:
        limits = store_limits.limit_rows(connection)
        states = {limit.name: limit_state(connection, limit, now_ns) for limit in limits}
        standing = alerts.budgets_in(connection)
    return [_document(budget) | states.get(budget.name, {}) for budget in standing]


def set_budget(
    books: Books,
    *,
    name: str,
    tenant: Name,
    amount: Amount,
    per: BudgetSpan = BudgetSpan.MONTH,
    of: Of = Of.TENANT,
    value: Annotated[
        str, text(200, "The key's id, the user, or NAME=VALUE of a tag; hard: * for each")
    ] = "",
    hard: Annotated[bool, Argument("Refuse what would pass it, with 429 until it ends")] = False,
    ask: Annotated[Amount | Literal[""], Argument("Per topup: the top-up to ask for")] = "",
    most: Annotated[int, Argument("Per topup: how often a day; 0 is 3", ge=0, le=100)] = 0,
    by: str,
    why: Why,
) -> Document:
    """Create or change a budget. It alerts where the server has `billing.alerts_to`, and refuses
    requests only if it is hard.

    A top-up budget requests `ask` when the balance falls below it, at most `most` times a day.
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
        hard=hard,
    )
    alerts.set_budget(books.accounts, budget, by=by, now_ns=time.time_ns(), reason=why)
    return _document(budget)


def remove_budget(books: Books, *, name: str, by: str, why: Why) -> list[Document]:
    """Remove a budget. Returns the remaining ones."""
    alerts.remove_budget(books.accounts, name, by=by, now_ns=time.time_ns(), reason=why)
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
        "hard": budget.hard,
    }
