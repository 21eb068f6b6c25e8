"""Parts for tests of billing and of its users: a manual clock and a ready ledger."""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from billing.accounts import Accounts
from billing.gate.commands import Deposit
from billing.gate.entries import Entry, Kind
from billing.gate.holds import Hold, RequestContext
from billing.gate.outcomes import Outcome
from billing.gate.work import Settled
from billing.ledger import Ledger
from billing.operations.books import OpenBooks
from billing.prices.book import NS
from billing.prices.cards import default_card
from billing.proof import audit
from billing.proof.prover import Prover
from billing.reports.receipts import ReceiptSigner
from billing.store import reports as store_reports
from billing.store.opening import database_url, open_store
from billing.store.store import LedgerStore
from billing.tenants import Tenant
from billing.usage import Usage

START_NS = 1_735_689_600 * NS  # 2025-01-01T00:00:00Z, a Wednesday
USAGE = Usage(hit_disk=900, miss=100, output=7)
PRICE = 204_000_000  # of that usage at the launch card, in units


class ManualClock:
    """A clock that changes only when set."""

    def __init__(self, now_ns: int = START_NS) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: int) -> None:
        self.now_ns += seconds * NS


@dataclass(slots=True)
class TestLedger:
    """A running ledger with a tenant `acme` that pays in CNY, and blocking shorthands."""

    __test__ = False

    ledger: Ledger
    accounts: Accounts
    clock: ManualClock

    def account(self, tenant: str = "acme") -> Tenant:
        return self.accounts.tenant(tenant)

    def fund(self, amount: int, tenant: str = "acme") -> None:
        self.deposit(Kind.TOPUP, amount, f"fund-{self.account(tenant).seq}", tenant, by="test")

    def deposit(
        self, kind: Kind, amount: int, reference: str, tenant: str = "acme", **more: Any
    ) -> Entry:
        about = {"by": "ops", "reason": "as agreed"} | more
        return self.ledger.post(Deposit(tenant, kind, reference, amount, **about)).result()

    def correct(
        self, request_id: str, reference: str, amount: int | None = None, reason: str = "slow"
    ) -> Entry:
        about = {"reference": reference, "by": "ops", "reason": reason}
        return self.ledger.correct("acme", request_id, amount=amount, **about).result()

    def reserve(
        self, request_id: str, amount: int, tenant: str = "acme", ttl_s: int = 60, **context: Any
    ) -> Hold:
        pinned = self.ledger.book.at("model", self.clock(), "CNY")
        about = RequestContext(**context)
        future = self.ledger.reserve(tenant, request_id, amount, pinned, context=about, ttl_s=ttl_s)
        return future.result()

    def charge(self, request_id: str, usage: Usage, tenant: str = "acme", **context: Any) -> Hold:
        """Reserves nothing and settles as finished."""
        hold = self.reserve(request_id, 0, tenant, **context)
        self.settle(hold, usage)
        return hold

    def settle(
        self,
        hold: Hold,
        usage: Usage,
        outcome: Outcome = Outcome.FINISHED,
        *,
        delivered: bool = True,
    ) -> Settled:
        return self.ledger.settle(hold, usage, outcome, delivered=delivered).result()

    def lapse(self, hold: Hold, usage: Usage) -> None:
        """Records this progress and ends the hold's lease, which is then swept."""
        self.ledger.top_up(hold, usage=usage).result()
        self.ledger._leases[hold.key] = 0.0
        self.ledger.sweeper.sweep()


def priced(match: str, hit: str, miss: str, output: str, **more: Any) -> dict[str, Any]:
    """A model of a card: prices a million tokens. A window's own are a table of its name."""
    return {"match": match, "hit": hit, "miss": miss, "output": output, **more}


def card_text(
    name: str,
    *models: Mapping[str, Any],
    valid_from: str = "2025-01-01T00:00:00Z",
    currency: str = "CNY",
    window: tuple[str, str, str] | None = None,
    factors: Mapping[str, str] = {},
    **more: Any,
) -> str:
    """A rate card. `window` has a name, a start and an end; `factors` are of service tiers."""
    head = {"name": name, "version": "1", "currency": currency, **more}
    lines = ["[card]", f"valid_from = {valid_from}", *_set(head)]
    if window is not None:
        lines += ["[[window]]", *_set(dict(zip(("name", "start", "end"), window, strict=True)))]
    for tier, factor in factors.items():
        lines += ["[[service]]", *_set({"name": tier, "factor": factor})]
    for model in models:
        lines += ["[[model]]", *_set({k: v for k, v in model.items() if isinstance(v, str)})]
        for below, table in model.items():
            if isinstance(table, dict):
                lines += [f"[[model.{below}]]" if below == "above" else f"[model.{below}]"]
                lines += _set(table)
    return "\n".join(lines) + "\n"


def _set(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {json.dumps(value)}" for name, value in values.items()]


def fresh_ledger(file: Path) -> str:
    """The URL of a SQLite database with the schema and nothing in it, or of the one that is there.
    Migrations take half of a short test's time."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_empty_ledger())
    return f"sqlite:///{file}"


@cache
def _empty_ledger() -> bytes:
    with TemporaryDirectory() as folder:
        open_store(database_url(Path(folder))).close()
        return (Path(folder) / "ledger.sqlite3").read_bytes()


@contextmanager
def running_ledger(
    url: str,
    *,
    clock: ManualClock | None = None,
    owner: str = "server",
    timer_ns: ManualClock | None = None,
) -> Iterator[TestLedger]:
    """A ledger on `url`, with the tenant `acme`; closed afterwards."""
    clock = clock or ManualClock()
    if url.startswith("sqlite:///"):
        fresh_ledger(Path(url.removeprefix("sqlite:///")))
    store = open_store(url)
    accounts = Accounts(store, clock_ns=clock)
    clocks: dict[str, Any] = {"clock_ns": clock, "timer_ns": timer_ns}
    ledger = Ledger(store, accounts, owner=owner, first_card=default_card(), **clocks)
    ledger.start()
    try:
        if accounts.find_tenant("acme") is None:
            accounts.create_tenant("acme", "CNY", by="test")
        yield TestLedger(ledger, accounts, clock)
    finally:
        ledger.close()
        store.close()


def books_of(house: TestLedger, signer: ReceiptSigner) -> OpenBooks:
    """As a server that runs has them."""
    store = house.accounts.store
    return OpenBooks(store, house.accounts, house.ledger, Prover(store), signer)


def entries_of(store: LedgerStore, tenant: str = "acme") -> list[Entry]:
    with store.reading() as connection:
        return list(store_reports.stream_entries(connection, tenant))


def charges_of(store: LedgerStore, tenant: str = "acme") -> list[Entry]:
    return [entry for entry in entries_of(store, tenant) if entry.kind is Kind.CHARGE]


def booked(url: str, tenant: str = "acme") -> list[Entry]:
    """A tenant's entries in a ledger that is opened for this, and proved."""
    with closing(open_store(url)) as store:
        assert audit.verify(store).problems == []
        return entries_of(store, tenant)
