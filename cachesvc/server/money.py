"""Builds the money half from settings: store, accounts, ledger, and their parts for the wire.

`start` before the first request, `close` after the last. The ledger has its own thread; `refresh`
and `audit` read the store and are called off the event loop.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from limits.errors import ConfigurationError

from api.access.auth import KeyGate, Salts
from api.access.rate_limits import LimitSettings, Overrides, Quota, WindowLimits, open_limits
from api.requests.metering import LedgerMeter
from billing.accounts import OPEN_TENANT, Accounts
from billing.clock import boot_timer_ns
from billing.errors import BillingError
from billing.gate.entries import Entry, Kind
from billing.gate.holds import decode_request
from billing.gate.limits import period_ns, period_of
from billing.gate.rollups import DAY_NS
from billing.gate.work import Settled
from billing.idempotency import Idempotency
from billing.ledger import Ledger
from billing.money import UNITS
from billing.operations.books import OpenBooks
from billing.prices.book import NS, RateCard
from billing.prices.cards import default_card
from billing.prices.rating import charge_in
from billing.proof.prover import Prover
from billing.reports.heads import send_heads, signed_heads
from billing.reports.receipts import ReceiptSigner, describe
from billing.store import reports as store_reports
from billing.store.opening import database_url, open_store
from billing.usage import HIT_CLASSES
from cachesvc.config.errors import ConfigError
from cachesvc.config.sections import LimitsSection, QuotaTable
from cachesvc.config.settings import Settings
from cachesvc.config.sources import without_passwords
from cachesvc.observability.snapshot import MoneyStats, TenantMoney
from cachesvc.operator.secret import read_secret

logger = logging.getLogger(__name__)

LEASE_S = 120  # of a hold: twice the longest silence of a live request with a stalled client
OTHERS = "*"  # every tenant or key without limits of its own
SOLD = (*HIT_CLASSES, "miss", "output")
ObserveBill = Callable[[str, Mapping[str, int], int], None]


@dataclass(slots=True)
class Money:
    """The parts, and a snapshot for scrapes."""

    books: OpenBooks
    bills: "Bills"
    gatekeeper: KeyGate
    salts: Salts
    limits: WindowLimits
    replays: Idempotency
    required: bool
    heads_to: str = ""
    _stats: MoneyStats = field(default_factory=MoneyStats)

    @property
    def accounts(self) -> Accounts:
        return self.books.accounts

    @property
    def requires_keys(self) -> bool:
        return self.required or self.accounts.requires_keys

    def start(self, observe_bill: ObserveBill) -> LedgerMeter:
        """Settles what an earlier run left and starts the ledger. `observe_bill` is called per
        charge."""
        self.bills.observe = observe_bill
        self.books.store.renew_log()
        is_first = not self.accounts.book.cards
        self.books.ledger.start()
        if is_first:
            _say_currency(self.accounts.book.cards[0])
        for currency in {card.currency for card in self.accounts.book.cards}:
            observe_bill(currency, dict.fromkeys(SOLD, 0), 0)  # exports the counters from the start
        return LedgerMeter(self.books.ledger, lease_s=LEASE_S, receipts=self._receipt)

    def close(self) -> None:
        self.books.ledger.close()
        self.books.store.close()

    def stats(self) -> MoneyStats:
        """Holds and drift as of the last `refresh`, and the ledger thread's current counters. Any
        thread."""
        return replace(self._stats, ledger=self.books.ledger.stats())

    def refresh(self) -> None:
        """Updates holds, drift and tenants' amounts. Reads the store."""
        now_ns = time.time_ns()
        with self.books.store.reading() as connection:
            holds = store_reports.hold_list(connection)
            accounts = store_reports.all_accounts(connection)
            held = store_reports.held_by_tenant(connection)
            day, month = (period_ns(period_of(per, now_ns))[0] for per in ("day", "month"))
            today = store_reports.charged_since(connection, day // DAY_NS)
            this_month = store_reports.charged_since(connection, month // DAY_NS)
        oldest_ns = min(
            (decode_request(hold.body)[1].admitted_ns for hold in holds), default=time.time_ns()
        )
        drift = sum(abs(account.held - held.get(name, 0)) for name, account in accounts.items())
        drift += abs(sum(sum(account.balances.values()) for account in accounts.values()))
        charged = self.bills.charged
        tenants = tuple(
            TenantMoney(
                name,
                account.currency,
                *(n / UNITS for n in (account.worth, charged.get(name, 0))),
                *(since.get(name, 0) / UNITS for since in (today, this_month)),
            )
            for name, account in accounts.items()
        )
        age_s = max(0.0, (time.time_ns() - oldest_ns) / NS)
        self._stats = MoneyStats(len(holds), age_s, drift, tenants)

    def audit(self) -> int:
        """Proves the whole ledger. Logs the differences and returns their number."""
        problems = self.books.prover.prove().proof.problems
        for problem in problems:
            logger.error(f"the ledger does not add up: {problem}")
        return len(problems)

    def keep_heads(self) -> None:
        """Sends the signed heads to their store. Failures are logged."""
        try:
            if self.heads_to:
                line = signed_heads(self.books.store, self.books.signer, time.time_ns())
                send_heads(line, self.heads_to)
        except BillingError as error:
            told = without_passwords(str(error))
            logger.error(f"{told}; until it can, nothing proves that no tail was cut off")

    def _receipt(self, settled: Settled) -> Mapping[str, Any]:
        return self.books.signer.sign(describe(settled.entry, self.accounts.book))


@dataclass(slots=True)
class Bills:
    """The ledger's observer, which reports each charge to the metrics. Ledger thread."""

    accounts: Accounts
    observe: ObserveBill | None = None
    charged: Counter[str] = field(default_factory=Counter)  # units by tenant

    def __call__(self, entries: Sequence[Entry]) -> None:
        for entry in (each for each in entries if each.kind is Kind.CHARGE):
            self.charged[entry.tenant] -= entry.amount
            if self.observe is None:
                continue
            ref, _ = decode_request(entry.body)
            charge = charge_in(entry.details, self.accounts.book.pinned(ref))
            by_class = {line.name: line.amount for line in charge.lines}
            self.observe(entry.currency, by_class, charge.saved)


def open_money(settings: Settings) -> Money:
    """Open the ledger of a data directory, or of `billing.database_url`.

    Raises StoreError, and ConfigError for an unusable store of limits. Nothing is left open then.
    """
    data_dir = settings.server.data_dir
    with ExitStack() as opened:
        store = open_store(settings.billing.database_url or database_url(data_dir))
        opened.callback(store.close)
        store.claim(settings.billing.server_name)
        accounts = Accounts(store)
        bills = Bills(accounts)
        ledger = Ledger(
            store,
            accounts,
            owner=settings.billing.server_name,
            first_card=default_card(),
            timer_ns=boot_timer_ns,
            observers=(bills,),
        )
        required = settings.server.require_keys
        money = Money(
            books=OpenBooks(store, accounts, ledger, Prover(store), ReceiptSigner.open(data_dir)),
            bills=bills,
            gatekeeper=KeyGate(accounts, required=required),
            salts=Salts(
                read_secret(data_dir),
                {name: frozenset(tenants) for name, tenants in settings.server.groups.items()},
            ),
            limits=_limits(settings.limits, accounts.rate_limits),
            replays=Idempotency(store, owner=settings.billing.server_name),
            required=required,
            heads_to=settings.billing.heads_to,
        )
        opened.pop_all()  # from here on `Money.close` closes them
        return money


def _say_currency(card: RateCard) -> None:
    """Names the prices that a first start puts in force, and where to change them."""
    logger.info(
        f"requests are charged in {card.currency}, by rate card {card.name} {card.version}; to "
        "charge in another currency, `cachesvc prices apply FILE`, then `cachesvc tenants set "
        f"{OPEN_TENANT} --currency CODE` before its first request"
    )


def limit_settings(section: LimitsSection) -> LimitSettings:
    """The quotas of tenants and keys from the settings; * means all others."""
    tenants = {name: _quota(table) for name, table in section.tenants.items()}
    keys = {name: _quota(table) for name, table in section.keys.items()}
    return LimitSettings(
        tenant=tenants.pop(OTHERS, Quota()),
        key=keys.pop(OTHERS, Quota()),
        tenants=tenants,
        keys=keys,
    )


def _limits(section: LimitsSection, overrides: Overrides) -> WindowLimits:
    try:
        return open_limits(limit_settings(section), section.url, overrides)
    except (ConfigurationError, ImportError, ValueError) as error:
        said = f"limits.url {section.url!r} cannot be used: {error}"
        raise ConfigError(
            without_passwords(said) + "; write memory:// or redis://HOST:PORT/DB, which "
            'needs pip install "cachesvc[redis]"'
        ) from None


def _quota(table: QuotaTable) -> Quota:
    return Quota(**{name: amount or None for name, amount in table.model_dump().items()})
