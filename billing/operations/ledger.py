"""Entries, holds and the admin trail; re-rating of history; corrections."""

import time
from typing import Annotated

from billing.money import parse_positive
from billing.operations.arguments import (
    Amount,
    Argument,
    Days,
    Limit,
    Name,
    OfTenant,
    Reference,
    Text,
    Why,
)
from billing.operations.books import Books
from billing.prices.book import NS
from billing.proof import rerate
from billing.reports.documents import (
    Document,
    entry_document,
    hold_document,
    plan_document,
    trail_document,
)
from billing.store import reports as store_reports


def list_holds(books: Books, *, tenant: OfTenant = None) -> list[Document]:
    """Holds of running requests, oldest first."""
    books.accounts.expect(tenant)
    with books.store.reading() as connection:
        stored = store_reports.hold_list(connection, tenant)
    now_ns = time.time_ns()
    documents = [hold_document(hold, now_ns) for hold in stored]
    return sorted(documents, key=lambda document: -float(document["age_s"]))


def list_entries(
    books: Books,
    *,
    tenant: str,
    request_id: Annotated[str | None, Argument("Its charge and what corrected it")] = None,
    before: Annotated[
        Annotated[int, Argument(ge=1, lt=1 << 63)] | None, Argument("Older than this number")
    ] = None,
    limit: Limit = 50,
) -> list[Document]:
    """Entries of a tenant or of one request, newest first."""
    books.accounts.tenant(tenant)
    with books.store.reading() as connection:
        if request_id is not None:
            read = store_reports.request_entries(connection, tenant, request_id)
        else:
            read = store_reports.last_entries(connection, tenant, limit, before)
    return [entry_document(entry) for entry in read]


def admin_trail(books: Books, *, limit: Limit = 50) -> list[Document]:
    """Changes by administrators: who, what, before, after and why; newest first."""
    return [trail_document(row) for row in books.accounts.trail.newest(limit)]


def rerate_history(books: Books, *, tenant: OfTenant = None, days: Days = 31) -> Document:
    """What past requests would cost under the current cards. Changes nothing."""
    books.accounts.expect(tenant)
    pricing, since_ns = books.accounts.book.at, max(0, time.time_ns() - days * 86_400 * NS)
    return plan_document(rerate.rerate(books.store, pricing, since_ns=since_ns, tenant=tenant))


def correct_charge(
    books: Books,
    *,
    tenant: Name,
    request_id: Text,
    amount: Annotated[Amount | None, Argument("Gives back so much; without it, all of it")] = None,
    reference: Reference | None = None,
    by: str,
    why: Why,
) -> Document:
    """Refund a charge or a part of it, with a new entry that refers to it."""
    books.accounts.tenant(tenant)
    entry = books.ledger.correct(
        tenant,
        request_id,
        reference=reference or f"correct:{request_id}",
        by=by,
        reason=why,
        amount=None if amount is None else parse_positive(amount),
    ).result()
    return entry_document(entry)
