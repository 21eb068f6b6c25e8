"""The ledger: its operations, and the leases of the holds it gave.

api calls `reserve`, `top_up`, `settle` and `void` from the event loop; each returns a
`concurrent.futures.Future` that is done once the change is durable (await `asyncio.wrap_future`).
`billing.group_commit` applies the commands on its threads. Between batches `billing.sweeper` ends
expired holds and grants, and new rate cards are loaded.
"""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from billing.accounts import Accounts
from billing.clock import ClockWatch, said_behind
from billing.errors import BillingError, DuplicateRequest, LedgerUnavailable
from billing.gate.commands import Adjust, Command, Correct, Deposit, Reserve, Settle, TopUp
from billing.gate.entries import Entry
from billing.gate.holds import Hold, RequestContext
from billing.gate.outcomes import Outcome
from billing.gate.work import Settled
from billing.group_commit import GroupCommit, LedgerStats
from billing.names import check_text
from billing.prices.book import NS, PinnedRate, PriceBook, RateCard
from billing.store import reports as store_reports
from billing.store.store import LedgerStore
from billing.sweeper import Sweeper
from billing.usage import EMPTY, Usage

log = logging.getLogger(__name__)

DEFAULT_TTL_S = 120  # of a hold's lease; each top-up renews it

Observer = Callable[[Sequence[Entry]], None]


class Ledger:
    """The interface of the ledger. One thread calls `start` before use and `close` after.

    `owner` names this server in its holds. Servers that share a database each need their own, which
    must be the same after a restart.
    """

    def __init__(
        self,
        store: LedgerStore,
        accounts: Accounts,
        *,
        owner: str = "server",
        clock_ns: Callable[[], int] = time.time_ns,
        timer_ns: Callable[[], int] | None = None,
        observers: Sequence[Observer] = (),
        first_card: RateCard | None = None,
    ) -> None:
        self.store = store
        self.accounts = accounts
        self._boot = secrets.token_hex(8)
        self._clock_ns = clock_ns
        self._watch = ClockWatch(clock_ns, timer_ns)
        self._is_timed = timer_ns is not None
        self._observers = tuple(observers)
        self._first_card = first_card
        self._owner = owner
        self._leases: dict[tuple[str, str], float] = {}  # ends of our holds, by the monotonic clock
        self._unswept = ""  # why the last sweep failed; empty if it did not
        self._commits = GroupCommit(
            store,
            lambda: self.book,
            clock_ns=clock_ns,
            applied=self._applied,
            observe=self._observe,
            tick=self._tick,
        )
        self.sweeper = Sweeper(
            store,
            lambda: self.book,
            self._leases,
            owner=owner,
            boot=self._boot,
            clock_ns=clock_ns,
            observe=self._observe,
        )

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Settles what an earlier run left behind, then takes commands.

        A `first_card` is applied if no card ever was. Only servers pass one, because a command that
        books money must not decide prices.
        """
        if self._first_card is not None:
            self.accounts.prepare(self._first_card)
        with self.store.reading() as connection:
            newest_ns = store_reports.newest_ns(connection)
        if self._is_timed and (behind := said_behind(newest_ns, self._clock_ns())):
            log.warning(behind)
        self._commits.count(recovered=self.sweeper.recover())
        self._commits.start()

    def close(self) -> None:
        """Finishes queued commands, then stops. Later commands fail with `LedgerClosed`."""
        self._commits.close()

    def stats(self) -> LedgerStats:
        return self._commits.stats()

    @property
    def refuses(self) -> str:
        """Why no request can be admitted now; empty if they can."""
        try:
            self.check()
        except LedgerUnavailable as error:
            return str(error)
        return f"the ledger cannot be written: {why}" if (why := self.store.unwritable) else ""

    def check(self) -> None:
        """Raises `LedgerUnavailable` if the ledger is closed, and `ClockJumped`."""
        if closed := self.store.failed:
            raise LedgerUnavailable(f"the ledger is closed: {closed}")
        if (jumped := self._watch.jumped) is not None:
            raise jumped

    @property
    def book(self) -> PriceBook:
        return self.accounts.book

    # -- requests ----------------------------------------------------------------------------------

    def reserve(
        self,
        tenant: str,
        request_id: str,
        amount: int,
        pinned: PinnedRate,
        *,
        context: RequestContext | None = None,
        ttl_s: int = DEFAULT_TTL_S,
    ) -> "Future[Hold]":
        """Holds `amount` units if the tenant has them. The request keeps the result to its end.

        Fails with `InsufficientBalance`, `SpendLimitReached`, `UnknownTenant`, `TenantSuspended`,
        `CurrencyMismatch` or `DuplicateRequest`.
        """
        if (refused := self._refused_by_clock()) is not None:
            return refused
        context = context or RequestContext()
        if not context.admitted_ns:
            context = replace(context, admitted_ns=self._clock_ns())
        hold = Hold(tenant, request_id, pinned, context)
        expires_ns = self._clock_ns() + ttl_s * NS
        self._leases[hold.key] = time.monotonic() + ttl_s
        command = Reserve(hold, amount, expires_ns, self._owner, self._boot)
        return self._commits.submit(command)

    def top_up(
        self,
        hold: Hold,
        amount: int = 0,
        *,
        usage: Usage | None = None,
        ttl_s: int = DEFAULT_TTL_S,
    ) -> "Future[int]":
        """Raises a hold and renews its lease. Returns the amount held. Zero only renews.

        `usage` is what the client has been sent so far, which is billed after a crash. Fails with
        `InsufficientBalance` or `SpendLimitReached` (end the answer with `length`), or
        `UnknownHold`.
        """
        self._leases[hold.key] = time.monotonic() + ttl_s
        return self._commits.submit(TopUp(hold, amount, self._clock_ns() + ttl_s * NS, usage))

    def settle(
        self, hold: Hold, usage: Usage, outcome: Outcome, *, delivered: bool = True
    ) -> "Future[Settled]":
        """Charges a request and ends its hold. Repeated with the same hold, it returns the first
        charge.

        `delivered=False` says that no byte of the answer reached the client.
        """
        return self._commits.submit(Settle(hold, usage, outcome, delivered))

    def void(self, hold: Hold) -> "Future[Settled]":
        """Ends a hold without a charge, if the server failed before the first token."""
        return self.settle(hold, EMPTY, Outcome.FAILED, delivered=False)

    # -- balances ----------------------------------------------------------------------------------

    def post(self, command: Deposit | Adjust) -> "Future[Entry]":
        """Books money in or out, as a person decided, once per reference.

        A deposit settles debt first. Fails with `InsufficientBalance` for a withdrawal of money
        that is spent or held. What was spent of a chargeback becomes debt.
        """
        check_text(command.reference, "reference")
        check_text(command.reason, "reason")
        if isinstance(command, Adjust):
            check_text(command.deposit, "reference of the deposit")
        return self._refused_by_clock() or self._commits.submit(command)

    def correct(
        self,
        tenant: str,
        request_id: str,
        *,
        reference: str,
        by: str,
        reason: str,
        amount: int | None = None,
    ) -> "Future[Entry]":
        """Refunds a request's charge or part of it, once per reference."""
        check_text(reference, "reference")
        check_text(reason, "reason")
        return self._commits.submit(Correct(tenant, request_id, reference, amount, by, reason))

    def _refused_by_clock(self) -> "Future[Any] | None":
        """A failed future if the clock has jumped, for commands that would be dated by it.

        Running requests are still settled, because they are billed by their admission.
        """
        if (jumped := self._watch.jumped) is None:
            return None
        future: Future[Any] = Future()
        future.set_exception(jumped)
        return future

    # -- the thread of group commit ----------------------------------------------------------------

    def _applied(self, command: Command, result: object) -> None:
        """Removes the lease of an ended hold."""
        over = isinstance(command, Settle)
        refused = isinstance(result, BillingError) and not isinstance(result, DuplicateRequest)
        if isinstance(command, Reserve | Settle) and (over or refused):
            self._leases.pop(command.hold.key, None)

    def _observe(self, entries: Sequence[Entry]) -> None:
        for observer in self._observers:
            try:
                observer(entries)
            except Exception:
                log.exception("a ledger observer failed")

    def _tick(self) -> None:
        try:
            # Readiness keeps requests away, whose commits would tell.
            if self.store.unwritable or self.store.failed:
                self.store.probe()
            self.store.check_claim()
            self.store.check_schema()
            self.accounts.refresh()
            if self._is_timed:
                self._watch.compare(self.store.clock_ns())
            self._note_skew()
            self._commits.count(swept=self.sweeper.sweep())
            if self._watch.jumped is None:  # a wrong clock would end grants early and permanently
                self.sweeper.expire()
            self._unswept = ""
        except LedgerUnavailable as error:
            self._commits.count(failed_batches=1)
            if self._unswept != str(error):
                log.error("the ledger was not swept: %s", error)
            self._unswept = str(error)
        except Exception:
            log.exception("the ledger's sweep failed")

    def _note_skew(self) -> None:
        jumped = self._watch.jumped
        if jumped is not None and self._commits.stats().clock_skew_s == 0:
            log.error("%s", jumped)
        self._commits.set_clock_skew(round(self._watch.skew_ns / NS))
