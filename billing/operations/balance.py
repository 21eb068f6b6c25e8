"""Money in and out of a tenant's balance. Each reference is booked once, however often it is
sent."""

import secrets
import time
from enum import StrEnum
from typing import Annotated

from billing.errors import InvalidSpan
from billing.gate.commands import Adjust, Deposit
from billing.gate.entries import Kind
from billing.money import parse_not_negative, parse_positive
from billing.operations.arguments import Amount, Argument, Reference, Why, text
from billing.operations.books import Books
from billing.reports.documents import Document, tenant_document
from billing.reports.standing import end_of, standing


class Booking(StrEnum):
    """The kind of a booking."""

    GRANT = "grant"  # promotional money, spent before paid money
    TOPUP = "topup"  # a payment, which settles debt first
    WITHDRAW = "withdraw"  # a payout of paid money
    CHARGEBACK = "chargeback"  # a payment reversed by the payer's bank


KINDS = {
    Booking.GRANT: Kind.GRANT,
    Booking.TOPUP: Kind.TOPUP,
    Booking.WITHDRAW: Kind.WITHDRAWAL,
    Booking.CHARGEBACK: Kind.CHARGEBACK,
}


def show_balance(books: Books, *, tenant: str) -> Document:
    """What a tenant has, owes and has on hold, and what is left of its grants and limits."""
    found = tenant_document(books.accounts.tenant(tenant))
    return found | standing(books.store, tenant, time.time_ns())


def book_deposit(
    books: Books,
    *,
    tenant: str,
    kind: Booking,
    amount: Amount,
    reference: Annotated[
        Reference | None,
        Argument("Your own id of the payment. It is booked once, however often you send it"),
    ] = None,
    expires: Annotated[
        Annotated[str, text(10)] | None,
        Argument("Of a grant: its last day (UTC), such as 2027-01-31 or 90d"),
    ] = None,
    by: str,
    why: Why,
) -> Document:
    """Book money: a grant, a top-up, a withdrawal or a chargeback. Returns the tenant afterwards.

    What is left of a grant after its last day, `expires`, is removed.
    """
    units = parse_positive(amount)
    name = reference or f"{kind}_{secrets.token_hex(8)}"
    if expires and kind is not Booking.GRANT:
        raise InvalidSpan(f"a {kind} does not expire; only a grant does")
    ends_ns = end_of(expires, time.time_ns()) if expires else 0
    booked = Deposit(tenant, KINDS[kind], name, units, by, why, ends_ns)
    books.ledger.post(booked).result()
    return tenant_document(books.accounts.tenant(tenant))


def adjust_deposit(
    books: Books,
    *,
    tenant: str,
    deposit: Annotated[str, text(200, "Its reference", least=1)],
    amount: Annotated[str, text(60, "What it should have been; 0 undoes it")],
    reference: Reference | None = None,
    by: str,
    why: Why,
) -> Document:
    """Correct a mistyped top-up or grant with an entry for the difference."""
    units = parse_not_negative(amount)
    name = reference or f"adjust_{secrets.token_hex(8)}"
    books.ledger.post(Adjust(tenant, deposit, name, units, by, why)).result()
    return tenant_document(books.accounts.tenant(tenant))
