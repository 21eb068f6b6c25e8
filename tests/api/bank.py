"""A ledger with an app in front of it, for tests of the wire that charges."""

from api.access.auth import KeyGate
from api.requests.metering import LedgerMeter
from billing.accounts import Accounts
from billing.gate.commands import Deposit
from billing.gate.entries import Kind
from billing.idempotency import Idempotency
from billing.ledger import Ledger
from billing.operations.books import OpenBooks
from billing.prices.cards import default_card
from billing.proof.prover import Prover
from billing.reports.receipts import ReceiptSigner, describe
from billing.store.opening import open_store
from tests.support.billing import fresh_ledger
from tests.support.wire import fake_house

CHAT = "/v1/chat/completions"
HELLO = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]}
PROMPT_TOKENS = len("user: hi\nassistant: ")
HIT, MISS, OUTPUT = 100_000, 1_000_000, 2_000_000  # units a token under the DeepSeek launch card


class Bank:
    """A ledger, its accounts, and an app in front of it."""

    def __init__(self, folder, *, slice_tokens=4, lease_s=120, settings=None):
        self.store = open_store(fresh_ledger(folder / "ledger.sqlite3"))
        self.accounts = Accounts(self.store)
        self.entries = []
        self.ledger = Ledger(
            self.store, self.accounts, observers=[self.entries.extend], first_card=default_card()
        )
        self.ledger.start()
        self.signer = ReceiptSigner.open(folder)
        prover = Prover(self.store)
        self.books = OpenBooks(self.store, self.accounts, self.ledger, prover, self.signer)
        self.house = fake_house(
            gatekeeper=KeyGate(self.accounts),
            meter=LedgerMeter(
                self.ledger,
                slice_tokens=slice_tokens,
                lease_s=lease_s,
                receipts=lambda settled: self.signer.sign(
                    describe(settled.entry, self.ledger.book)
                ),
            ),
            replays=Idempotency(self.store),
            balances=self.accounts.tenant,
            opened=self.books,
            settings=settings,
        )

    def customer(self, units, tenant="acme", *, currency="CNY", **key):
        """A prepaid tenant with this much; the headers that its key makes."""
        self.accounts.create_tenant(tenant, currency, by="test")
        if units:
            self.ledger.post(
                Deposit(tenant, Kind.TOPUP, amount=units, reference="first", by="test")
            ).result()
        secret, _ = self.accounts.create_key(tenant, by="test", **key)
        return {"authorization": f"Bearer {secret}"}

    def spent(self, of, tenant="acme"):
        account = self.accounts.tenant(tenant)
        assert account.held == 0
        return of - account.balance

    def charges(self):
        """All of them. Ends the ledger, whose observers hear of an entry after its request does."""
        self.ledger.close()
        return [entry for entry in self.entries if entry.kind is Kind.CHARGE]

    def close(self):
        self.ledger.close()
        self.store.close()
