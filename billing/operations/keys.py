"""API keys. The key itself is shown once, by the call that creates it."""

import time
from collections.abc import Sequence
from datetime import date
from typing import Annotated

from billing.errors import InvalidName
from billing.keys import DEFAULT_SCOPES, Scope
from billing.operations.arguments import Argument, Name, OfTenant, Text, Why
from billing.operations.books import Books
from billing.prices.book import NS
from billing.reports.documents import Document, key_document

USUAL_SCOPES = tuple(scope for scope in Scope if scope in DEFAULT_SCOPES)
EPOCH = date(1970, 1, 1).toordinal()
MAX_VALIDITY_S = 100 * 366 * 86_400


def list_keys(books: Books, *, tenant: OfTenant = None) -> list[Document]:
    """Keys, shown by their prefixes only, each with the last UTC day on which it was charged."""
    books.accounts.expect(tenant)
    return keys_of(books, tenant)


def keys_of(books: Books, tenant: str | None) -> list[Document]:
    """The same, without asking whether the tenant exists."""
    from billing.store.reports import last_days  # imports the database

    now_ns = time.time_ns()
    with books.store.reading() as connection:
        found = last_days(connection)
    days = {key_id: str(date.fromordinal(EPOCH + number)) for key_id, number in found.items()}
    return [
        key_document(info, now_ns) | {"last_used": days.get(info.key_id)}
        for info in books.accounts.keys(tenant)
    ]


def create_key(
    books: Books,
    *,
    tenant: Name,
    project: Text = "",
    name: Text = "",
    scopes: Annotated[Sequence[Scope], Argument(min_length=1)] = USUAL_SCOPES,
    expires_in_s: Annotated[int, Argument(gt=0, le=MAX_VALIDITY_S)] | None = None,
    by: str,
    why: Why,
) -> Document:
    """A new key. `key` is in this answer only: it is not stored and cannot be shown again."""
    now_ns = time.time_ns()
    key, info = books.accounts.create_key(
        tenant,
        project=project,
        name=name,
        scopes=frozenset(known_scopes(scopes)),
        expires_ns=None if expires_in_s is None else now_ns + expires_in_s * NS,
        by=by,
        reason=why,
    )
    return {"key": key, **key_document(info, now_ns)}


def revoke_key(books: Books, *, key_id: str, by: str, why: Why) -> Document:
    """Revoke a key at once, by its id or its prefix."""
    info = books.accounts.revoke_key(key_id, by=by, reason=why)
    return key_document(info, time.time_ns())


def known_scopes(names: Sequence[str]) -> list[Scope]:
    """These scopes, checked: all known and at least one. Raises `InvalidName`."""
    known = ", ".join(Scope)
    unknown = [name for name in names if name not in list(Scope)]
    if unknown:
        raise InvalidName(f"scope {unknown[0]!r} is not among {known}")
    if not names:
        raise InvalidName(f"choose at least one scope, which says what the key may do: {known}")
    return [Scope(name) for name in names]
