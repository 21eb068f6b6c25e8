"""The books that operations work on: a ledger with its accounts and its receipt key.

A server has all parts open (`OpenBooks`). A command without a server opens each part on demand
(`FolderBooks`), because most operations need only the accounts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from billing.accounts import Accounts
    from billing.ledger import Ledger
    from billing.proof.prover import Prover
    from billing.reports.receipts import ReceiptSigner
    from billing.store.store import LedgerStore


@dataclass(frozen=True, slots=True)
class OpenBooks:
    """One server's accounts and ledger, all open."""

    store: "LedgerStore"
    accounts: "Accounts"
    ledger: "Ledger"
    prover: "Prover"
    signer: "ReceiptSigner"


class FolderBooks:
    """The books of a data directory without a running server. Used by one thread."""

    def __init__(self, store: "LedgerStore", data_dir: Path) -> None:
        from billing.accounts import Accounts

        self.store = store
        self.accounts = Accounts(store)
        self.data_dir = data_dir
        self._ledger: Ledger | None = None
        self._signer: ReceiptSigner | None = None

    @property
    def ledger(self) -> "Ledger":
        """A ledger of this process. Its thread runs until `close`."""
        if self._ledger is None:
            from billing.ledger import Ledger

            self._ledger = Ledger(self.store, self.accounts, owner="cli")
            self._ledger.start()
        return self._ledger

    @property
    def signer(self) -> "ReceiptSigner":
        if self._signer is None:
            from billing.reports.receipts import ReceiptSigner

            self._signer = ReceiptSigner.open(self.data_dir)
        return self._signer

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
        self.store.close()


Books = OpenBooks | FolderBooks  # every call may block
