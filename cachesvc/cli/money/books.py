"""Shared options of the money commands, and direct access to a directory's books.

Direct access is for commands that work on the database itself: proofs, rebuilding, exports and
passwords.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachesvc.cli.options import data_dir_of
from cachesvc.config.places import default_database_url
from cachesvc.importing import importing

if TYPE_CHECKING:
    from billing.operations.books import FolderBooks

MOST_DAYS = 3660  # the JSON routes' limit on days
MOST_ROWS = 1000  # the JSON routes' limit on rows
NO_REASON = "no reason given"

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        help="Open this ledger database, such as postgresql://...  "
        "[default: ask the running server, or open the ledger that it would open]",
        show_default=False,
    ),
]
_WHY = ("--why", "--reason")
Reason = Annotated[str, typer.Option(*_WHY, help="Reason for the audit trail", show_default=False)]
Why = Annotated[str, typer.Option(*_WHY, help="Reason for the entry and the audit trail")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, for scripts on a terminal")]
TenantName = Annotated[str, typer.Argument(help="Name of the tenant", show_default=False)]
TenantOption = Annotated[str | None, typer.Option("--tenant", help="Only this tenant")]


@contextmanager
def books(
    data_dir: Path | None, database: str | None, *, create: bool = False
) -> "Iterator[FolderBooks]":
    """The ledger of a URL, of the environment or of a data directory. Raises `BillingError`."""
    path = data_dir_of(data_dir)
    # Imported here, because importing the database takes longer than a running server's answer.
    with importing():
        from billing.operations.books import FolderBooks
        from billing.store.opening import database_url, open_store

        url = database or default_database_url() or database_url(path)
        found = FolderBooks(open_store(url, create=create), path)
    try:
        yield found
    finally:
        found.close()
