"""The ledger: one thread that turns commands into committed entries, many commands to a commit.

api calls `reserve`, `top_up`, `settle` and `void` from the event loop; each returns a
`concurrent.futures.Future` that is done once the change is durable (await `asyncio.wrap_future`).
The thread takes all commands that wait, up to `BATCH_LIMIT`, and applies them in one transaction:
group commit. What moved money is answered once it is durable, by `billing.syncer` where the disk is
waited for apart; the thread goes on with the next batch meanwhile. Between batches it sweeps ended
leases and looks for new rate cards.

The queue is bounded; when it is full a command fails at once with `LedgerUnavailable`. A command
whose future was cancelled before the thread took it is not applied.
"""

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from billing.accounts import Accounts
from billing.clock import ClockWatch
from billing.errors import (
    BillingError,
    ClockJumped,
    DuplicateRequest,
    LedgerClosed,
    LedgerUnavailable,
    Unwritable,
)
from billing.gate.commands import (
    Adjust,
    Command,
    Correct,
    Deposit,
    Expire,
    Reap,
    Reserve,
    Settle,
    TopUp,
    moves_money,
)
from billing.gate.entries import Entry, Kind
from billing.gate.holds import Hold, RequestContext
from billing.gate.outcomes import Outcome
from billing.gate.work import Settled
from billing.names import check_text
from billing.prices.book import NS, PinnedRate, PriceBook, RateCard
from billing.store import expiring as store_expiring
from billing.store.store import LedgerStore
from billing.syncer import Syncer
from billing.tenants import Tenant
from billing.usage import EMPTY, Usage

log = logging.getLogger(__name__)

BATCH_LIMIT = 512
QUEUE_LIMIT = 65_536
SWEEP_S = 1.0
DEFAULT_TTL_S = 120  # of a lease; each top-up renews it


@dataclass(frozen=True, slots=True)
class LedgerStats:
    """A snapshot; counters only grow. Amounts are in units, summed over all currencies' tenants."""

    batches: int = 0
    commands: int = 0
    refused: int = 0  # commands that ended in a billing error
    settled: int = 0
    swept: int = 0  # holds whose lease ended
    recovered: int = 0  # holds of an earlier run, settled at start
    failed_batches: int = 0
    queued: int = 0
    clock_skew_s: int = 0  # how far the host's clock is from where it should be
    commit_ns: int = 0  # spent in commits so far
    commit_ns_max: int = 0


Observer = Callable[[Sequence[Entry]], None]
_Item = tuple[Command, "Future[Any]"]
_Answer = tuple["Future[Any]", object]  # a result, or the exception that it is


class Ledger:
    """The face of the ledger. `start` before use, `close` after; both by one thread.

    `owner` names this server in its holds; with one database for several servers, each needs its
    own, and the same after a restart.
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
        self._owner = owner
        self._boot = secrets.token_hex(8)
        self._clock_ns = clock_ns
        self._watch = ClockWatch(clock_ns, timer_ns)
        self._is_timed = timer_ns is not None
        self._observers = tuple(observers)
        self._first_card = first_card
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._syncer = Syncer(store)
        self._counting = threading.Lock()  # of the counters: both threads count
        self._open = False
        self._stats = LedgerStats()
        self._leases: dict[tuple[str, str], float] = {}  # our holds: end by the monotonic clock

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Settle what an earlier run left behind, then take commands.

        A `first_card` is put in force where no card ever was. Only a server has one: a command that
        books money decides no prices.
        """
        if self._first_card is not None:
            self.accounts.prepare(self._first_card)
        self._recover()
        self._syncer.start()
        self._thread.start()
        self._open = True

    def close(self) -> None:
        """Finish what is queued, then stop. Later commands fail with `LedgerClosed`."""
        if self._open:
            self._open = False
            self._queue.put(None)
            self._thread.join()
            self._refuse_rest()
            self._syncer.close()

    def stats(self) -> LedgerStats:
        return replace(self._stats, queued=self._queue.qsize())

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
        """Hold `amount` units if the tenant has them. The result goes with the request to its end.

        Fails with `InsufficientBalance`, `UnknownTenant`, `TenantSuspended`, `CurrencyMismatch` or
        `DuplicateRequest`.
        """
        if (jumped := self._jumped()) is not None:
            return jumped
        context = context or RequestContext()
        if not context.admitted_ns:
            context = replace(context, admitted_ns=self._clock_ns())
        hold = Hold(tenant, request_id, pinned, context)
        expires_ns = self._clock_ns() + ttl_s * NS
        self._leases[hold.key] = time.monotonic() + ttl_s
        return self._submit(Reserve(hold, amount, expires_ns, self._owner, self._boot))

    def top_up(
        self,
        hold: Hold,
        amount: int = 0,
        *,
        usage: Usage | None = None,
        ttl_s: int = DEFAULT_TTL_S,
    ) -> "Future[int]":
        """Raise a hold and renew its lease; gives the amount held. Zero only renews.

        `usage` is what the client has been sent so far: a crash is billed from it. Fails with
        `InsufficientBalance` (end the answer with `length`) or `UnknownHold`.
        """
        self._leases[hold.key] = time.monotonic() + ttl_s
        return self._submit(TopUp(hold, amount, self._clock_ns() + ttl_s * NS, usage))

    def settle(
        self, hold: Hold, usage: Usage, outcome: Outcome, *, delivered: bool = True
    ) -> "Future[Settled]":
        """Charge a request and end its hold. Again with the same hold, it finds the first charge.

        `delivered=False` says that no byte of the answer reached the client.
        """
        return self._submit(Settle(hold, usage, outcome, delivered))

    def void(self, hold: Hold) -> "Future[Settled]":
        """End a hold without a charge: the server failed before the first token."""
        return self.settle(hold, EMPTY, Outcome.FAILED, delivered=False)

    # -- balances ----------------------------------------------------------------------------------

    def balance(self, tenant: str) -> Tenant:
        """The account now. Reads the store: call it off the event loop, or rarely."""
        return self.accounts.tenant(tenant)

    def grant(
        self,
        tenant: str,
        amount: int,
        *,
        reference: str,
        by: str,
        reason: str = "",
        expires_ns: int = 0,
    ) -> "Future[Entry]":
        """Give promotional money, once for each reference; what is left of it at `expires_ns` is
        taken back (0: never)."""
        command = Deposit(tenant, Kind.GRANT, reference, amount, by, reason, expires_ns)
        return self._deposit(command)

    def deposit(
        self, tenant: str, amount: int, *, reference: str, by: str, reason: str = ""
    ) -> "Future[Entry]":
        """Book money that was paid, once for each reference; what is owed is settled first."""
        return self._deposit(Deposit(tenant, Kind.TOPUP, reference, amount, by, reason))

    def withdraw(
        self, tenant: str, amount: int, *, reference: str, by: str, reason: str
    ) -> "Future[Entry]":
        """Book paid money that was paid out again. Fails with `InsufficientBalance` where it is
        spent or held."""
        return self._deposit(Deposit(tenant, Kind.WITHDRAWAL, reference, amount, by, reason))

    def charge_back(
        self, tenant: str, amount: int, *, reference: str, by: str, reason: str
    ) -> "Future[Entry]":
        """Book a payment that the payer's bank took back; what was spent of it is owed."""
        return self._deposit(Deposit(tenant, Kind.CHARGEBACK, reference, amount, by, reason))

    def adjust(
        self, tenant: str, deposit: str, amount: int, *, reference: str, by: str, reason: str
    ) -> "Future[Entry]":
        """Make the top-up or grant of reference `deposit` what it should have been."""
        check_text(deposit, "reference of the deposit")
        return self._deposit(Adjust(tenant, deposit, reference, amount, by, reason))

    def _deposit(self, command: Deposit | Adjust) -> "Future[Entry]":
        check_text(command.reference, "reference")
        check_text(command.reason, "reason")
        return self._jumped() or self._submit(command)

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
        """Give back a request's charge or part of it, once for each reference."""
        check_text(reference, "reference")
        check_text(reason, "reason")
        return self._submit(Correct(tenant, request_id, reference, amount, by, reason))

    def _jumped(self) -> "Future[Any] | None":
        """What says that the clock is wrong, in place of what would be dated by it. Requests that
        run are settled all the same: they are billed by their admission."""
        try:
            self._watch.check()
        except ClockJumped as error:
            future: Future[Any] = Future()
            future.set_exception(error)
            return future
        return None

    # -- the thread --------------------------------------------------------------------------------

    def _submit(self, command: Command) -> "Future[Any]":
        future: Future[Any] = Future()
        if not self._open:
            future.set_exception(LedgerClosed("the ledger is not running"))
            return future
        if self._queue.qsize() < QUEUE_LIMIT:
            self._queue.put((command, future))
        else:
            future.set_exception(LedgerUnavailable("too many ledger commands wait; try later"))
        if not self._thread.is_alive():  # it was closed meanwhile
            self._refuse_rest()
        return future

    def _refuse_rest(self) -> None:
        """Answer what came too late for the thread to take."""
        with suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if item is not None and item[1].set_running_or_notify_cancel():
                    item[1].set_exception(LedgerClosed("the ledger was closed"))

    def _run(self) -> None:
        swept = time.monotonic()
        running = True
        while running:
            batch, running = self._next_batch()
            if batch:
                self._commit(batch)
            if time.monotonic() - swept >= SWEEP_S:
                swept = time.monotonic()
                self._tick()

    def _next_batch(self) -> tuple[list[_Item], bool]:
        """All that waits, up to the limit; False when the ledger is closing."""
        batch: list[_Item] = []
        try:
            item = self._queue.get(timeout=SWEEP_S)
            while item is not None:
                if item[1].set_running_or_notify_cancel():
                    batch.append(item)
                if len(batch) == BATCH_LIMIT:
                    return batch, True
                item = self._queue.get_nowait()
        except queue.Empty:
            return batch, True
        return batch, False

    def _commit(self, batch: list[_Item]) -> None:
        """Apply a batch. What holds wait for is done then; what moved money, once it is durable."""
        began_ns = time.monotonic_ns()
        commands = [command for command, _ in batch]
        try:
            results, entries = self.store.apply(commands, self.book, self._clock_ns, sync=False)
        except Exception as error:  # noqa: BLE001  the top of the thread: nothing was written
            self._not_written(batch, error)
            return
        self._note(commands, results, time.monotonic_ns() - began_ns)
        held: list[_Answer] = []
        moved: list[_Answer] = []
        for (command, future), result in zip(batch, results, strict=True):
            waits = self.store.syncs_apart and moves_money(command)
            (moved if waits else held).append((future, result))
        _answer(held)
        if moved:
            self._syncer.later(partial(self._durable, moved, entries))
        else:
            self._observe(entries)

    def _durable(self, moved: list[_Answer], entries: list[Entry], error: Exception | None) -> None:
        """Sync thread: a batch has reached the disk, or has not."""
        if error is not None:
            names = [f"{entry.tenant}/{entry.request_id}" for entry in entries]
            log.error("not known to be on the disk, correct what stands: %s", ", ".join(names))
            self._count(failed_batches=1)
            _answer([(future, error) for future, _ in moved])
            return
        _answer(moved)
        self._observe(entries)

    def _not_written(self, batch: list[_Item], error: Exception) -> None:
        """Say so to all; or, where it is the fault of one of them, to that one alone."""
        passing = isinstance(error, LedgerUnavailable) and not isinstance(error, Unwritable)
        if len(batch) > 1 and not passing:
            for item in batch:
                self._commit([item])
            return
        log.error("a batch of %d ledger commands failed", len(batch), exc_info=error)
        self._count(failed_batches=1)
        self._fail(batch, error)

    def _fail(self, batch: list[_Item], error: Exception) -> None:
        if not isinstance(error, BillingError):
            cause, error = error, LedgerUnavailable(f"the ledger failed: {error}")
            error.__cause__ = cause
        for _, future in batch:
            future.set_exception(error)

    def _note(self, commands: list[Command], results: list[object], took_ns: int) -> None:
        for command, result in zip(commands, results, strict=True):
            over = isinstance(command, Settle)
            refused = isinstance(result, BillingError) and not isinstance(result, DuplicateRequest)
            if isinstance(command, Reserve | Settle) and (over or refused):
                self._leases.pop(command.hold.key, None)
        self._count(
            batches=1,
            commands=len(commands),
            refused=sum(isinstance(result, BillingError) for result in results),
            settled=sum(isinstance(r, Settled) and not r.repeated for r in results),
            commit_ns=took_ns,
        )
        with self._counting:
            slowest = max(self._stats.commit_ns_max, took_ns)
            self._stats = replace(self._stats, commit_ns_max=slowest)

    def _count(self, **more: int) -> None:
        with self._counting:
            changes: dict[str, Any] = {k: getattr(self._stats, k) + n for k, n in more.items()}
            self._stats = replace(self._stats, **changes)

    def _observe(self, entries: Sequence[Entry]) -> None:
        for observer in self._observers:
            try:
                observer(entries)
            except Exception:
                log.exception("a ledger observer failed")

    # -- leases ------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Settle the holds of this server's earlier runs from their journaled progress."""
        stale = [
            Reap(hold.tenant, hold.request_id, Outcome.CRASHED, None)
            for hold in self.store.all_holds()
            if hold.owner == self._owner and hold.boot != self._boot
        ]
        for start in range(0, len(stale), BATCH_LIMIT):
            done = self._reap(stale[start : start + BATCH_LIMIT])
            self._count(recovered=done)
        if stale:
            log.warning("settled %d requests that an earlier run left unfinished", len(stale))

    def _tick(self) -> None:
        try:
            self.accounts.refresh()
            if self._is_timed:
                self._watch.compare(self.store.clock_ns())
            self._note_skew()
            self._count(swept=self.sweep())
            if self._jumped() is None:  # a wrong clock would end grants early, for good
                self.expire()
        except Exception:  # the store may be away; commands say so to their callers
            log.exception("the ledger's sweep failed")

    def _note_skew(self) -> None:
        try:
            self._watch.check()
        except ClockJumped as error:
            if self._stats.clock_skew_s == 0:
                log.error("%s", error)
        skew_s = round(self._watch.skew_ns / NS)
        with self._counting:
            self._stats = replace(self._stats, clock_skew_s=skew_s)

    def sweep(self) -> int:
        """End the holds whose lease is over; gives how many. Our own are timed by the monotonic
        clock, so a jump of the wall clock does not end the hold of a running request."""
        now_ns, now = self._clock_ns(), time.monotonic()
        ended = [
            Reap(hold.tenant, hold.request_id, Outcome.LAPSED, None if mine else now_ns)
            for hold in self.store.all_holds()
            for mine in [hold.boot == self._boot]
            if (self._leases.get(hold.key, 0.0) <= now if mine else hold.expires_ns <= now_ns)
        ]
        for key, ends in list(self._leases.items()):  # of what was never held, too
            if ends <= now:
                self._leases.pop(key, None)
        return self._reap(ended) if ended else 0

    def expire(self) -> int:
        """End the grants whose time is over; gives how many."""
        now_ns = self._clock_ns()
        with self.store.reading() as connection:
            due = store_expiring.due_grants(connection, now_ns, BATCH_LIMIT)
        if not due:
            return 0
        results, entries = self.store.apply(
            [Expire(*grant) for grant in due], self.book, self._clock_ns
        )
        self._observe(entries)
        for result in results:
            if isinstance(result, BillingError):
                log.error("a grant cannot be ended: %s", result)
        return len(entries)

    def _reap(self, commands: list[Reap]) -> int:
        """Settles these holds; one that cannot be read keeps no other from its end."""
        try:
            results, entries = self.store.apply(
                cast(list[Command], commands), self.book, self._clock_ns
            )
        except (ValueError, KeyError, TypeError) as error:
            if len(commands) > 1:
                return sum(self._reap([command]) for command in commands)
            log.error("a hold cannot be read: %s", commands[0], exc_info=error)
            return 0
        self._observe(entries)
        for result in results:
            if isinstance(result, BillingError):
                log.error("a hold cannot be settled: %s", result)
        return sum(isinstance(result, Settled) for result in results)


def _answer(answers: Sequence[_Answer]) -> None:
    for future, result in answers:
        if isinstance(result, BillingError):
            future.set_exception(result)
        else:
            future.set_result(result)
