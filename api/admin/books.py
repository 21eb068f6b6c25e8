"""The money that admin routes read and change, as one part. All of it blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import Request

from api.admin.parts import parts_of
from api.errors import RecordNotFound, Unsupported
from billing.accounts import Accounts
from billing.errors import UnknownHold, UnknownKey, UnknownTenant
from billing.ledger import Ledger
from billing.proof.prover import Prover
from billing.reports.receipts import ReceiptSigner
from billing.store.store import LedgerStore


@dataclass(frozen=True, slots=True)
class Books:
    """One server's accounts and ledger."""

    store: LedgerStore
    accounts: Accounts
    ledger: Ledger
    prover: Prover
    signer: ReceiptSigner


def books_of(request: Request) -> Books:
    """The books of the server that this request came to. Raises Unsupported where it has none."""
    books = parts_of(request).books
    if books is None:
        raise Unsupported("this server keeps no accounts")
    return books


@contextmanager
def found() -> Iterator[None]:
    """A tenant, key or request that is named in a path and is not there is a 404, not a refusal."""
    try:
        yield
    except (UnknownTenant, UnknownKey, UnknownHold) as error:
        raise RecordNotFound(str(error)) from error
