"""What the commands about money share: where the ledger is, who acts, and errors as one
sentence.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from billing.accounts import Accounts
from billing.errors import BillingError
from billing.ledger import Ledger
from billing.money import format_units
from billing.store.store import LedgerStore, database_url, open_store
from cachesvc.cli.options import DataDir
from cachesvc.cli.render import fail
from cachesvc.config import default_data_dir
from cachesvc.server.server_file import actor

T = TypeVar("T")

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        help="Ledger database, such as postgresql://...  [default: SQLite in the data directory]",
        show_default=False,
    ),
]
Reason = Annotated[str, typer.Option(help="Why; kept in the admin trail")]
TenantName = Annotated[str, typer.Argument(help="Name of the tenant", show_default=False)]
RequestId = Annotated[str, typer.Argument(help="Id of the request", show_default=False)]
TenantOption = Annotated[str | None, typer.Option("--tenant", help="Only this tenant")]

__all__ = [
    "DataDir",
    "DatabaseUrl",
    "OpenBooks",
    "Reason",
    "RequestId",
    "TenantName",
    "TenantOption",
    "actor",
    "books",
]


class OpenBooks:
    """An open ledger database and the accounts on it."""

    def __init__(self, store: LedgerStore, data_dir: Path) -> None:
        self.store = store
        self.accounts = Accounts(store)
        self.data_dir = data_dir

    def with_ledger(self, operation: Callable[[Ledger], T]) -> T:
        """Run one operation on a ledger of our own, beside a running server or without one."""
        ledger = Ledger(self.store, self.accounts, owner="cli")
        ledger.start()
        try:
            return operation(ledger)
        finally:
            ledger.close()


@contextmanager
def books(
    data_dir: Path | None, database: str | None, *, create: bool = False
) -> Iterator[OpenBooks]:
    """The ledger of a data directory or URL; a billing error ends the command with its sentence."""
    path = (data_dir or default_data_dir()).expanduser()
    try:
        store = open_store(database or database_url(path), create=create)
        try:
            yield OpenBooks(store, path)
        finally:
            store.close()
    except BillingError as error:
        fail(str(error))


def limit_text(units: int | None) -> str:
    """A credit limit or available amount for people."""
    return "unlimited" if units is None else format_units(units)
