"""Budgets: what tenants, keys, users and tags may spend before an alert or a refusal."""

import time
from datetime import UTC, datetime
from typing import Annotated, Literal

from billing.alerts import budgets as alerts
from billing.alerts.budgets import Budget, BudgetSpan, Of
from billing.gate.limits import NOTHING
from billing.gate.periods import period_ns, period_of
from billing.money import format_units, parse_positive
from billing.operations.arguments import Amount, Argument, Name, Why, text
from billing.operations.books import Books
from billing.prices.book import NS
from billing.reports.documents import Document
from billing.store import limits as store_limits
from billing.store.store import Connection

USUAL_A_DAY = 3  # top-ups


def list_budgets(books: Books) -> list[Document]:
    """The budgets of tenants, keys, users and tags, by name.

    A hard one says what its period has charged and holds; for each key or user, of the highest.
    """
    now_ns = time.time_ns()
    with books.store.reading() as connection:
        return [
            _document(budget) | (_state(connection, budget, now_ns) if budget.hard else {})
            for budget in alerts.budgets_in(connection)
        ]


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
    """Create or change a budget. It alerts, and refuses requests only if it is hard.

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


def _state(connection: Connection, budget: Budget, now_ns: int) -> Document:
    """What a limit counts now, and when it ends."""
    period = period_of(budget.span, now_ns)
    found = store_limits.highest(connection, budget.name, period)
    who, spending = found or (None, NOTHING)
    ends = datetime.fromtimestamp(period_ns(period)[1] // NS, UTC)
    return {
        "spent": format_units(spending.charged),
        "held": format_units(spending.held),
        "highest": who.value if who else "",
        "ends_at": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
