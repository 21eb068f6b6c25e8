"""Budgets: what tenants, keys, users and tags may spend before requests are refused."""

import time
from typing import Annotated

from billing import budgets
from billing.budgets import BudgetSpan, Of
from billing.gate.limits import SpendLimit
from billing.money import format_units, parse_positive
from billing.operations.arguments import Amount, Name, Why, text
from billing.operations.books import Books
from billing.reports.documents import Document
from billing.reports.standing import limit_state
from billing.store import limits as store_limits


def list_budgets(books: Books) -> list[Document]:
    """The budgets of tenants, keys, users and tags, by name.

    Each says what its period has charged, holds and leaves; of each key or user, that of the one
    that spent most.
    """
    now_ns = time.time_ns()
    with books.store.reading() as connection:
        limits = store_limits.limit_rows(connection)
        return [_document(limit) | limit_state(connection, limit, now_ns) for limit in limits]


def set_budget(
    books: Books,
    *,
    name: str,
    tenant: Name,
    amount: Amount,
    per: BudgetSpan = BudgetSpan.MONTH,
    of: Of = Of.TENANT,
    value: Annotated[
        str, text(200, "The key's id, the user, or NAME=VALUE of a tag; * for each key or user")
    ] = "",
    by: str,
    why: Why,
) -> Document:
    """Create or change a budget. Requests that would pass it are refused until its period ends."""
    units = parse_positive(amount)
    budget = SpendLimit(name=name, tenant=tenant, amount=units, per=per, of=of, value=value)
    budgets.set_budget(books.accounts, budget, by=by, now_ns=time.time_ns(), reason=why)
    return _document(budget)


def remove_budget(books: Books, *, name: str, by: str, why: Why) -> list[Document]:
    """Remove a budget. Returns the remaining ones."""
    budgets.remove_budget(books.accounts, name, by=by, reason=why)
    return list_budgets(books)


def _document(limit: SpendLimit) -> Document:
    shown = {name: getattr(limit, name) for name in ("name", "tenant", "per", "of", "value")}
    return shown | {"amount": format_units(limit.amount)}
