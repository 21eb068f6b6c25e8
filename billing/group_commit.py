"""Group commit: applies all waiting commands in one transaction.

Two threads take turns. One takes a batch from the `inbox` and applies it. While it waits for the
disk (`billing.syncer`), the other takes the next batch. Commands that moved money are answered once
they are durable. One batch is applied at a time. Between batches the ledger's `tick` is called.

The inbox is bounded. When it is full, a command fails at once with `LedgerUnavailable`.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from billing.errors import BillingError, LedgerClosed, LedgerUnavailable, Unwritable
from billing.gate.commands import Command, moves_money
from billing.gate.entries import Entry
from billing.gate.work import Settled
from billing.inbox import Inbox, Item
from billing.prices.book import PriceBook
from billing.store.store import LedgerStore
from billing.syncer import Syncer

log = logging.getLogger(__name__)

TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class LedgerStats:
    """A snapshot of monotonic counters. Amounts are in units, summed over all currencies."""

    batches: int = 0
    commands: int = 0
    refused: int = 0  # commands that ended in a billing error
    settled: int = 0
    swept: int = 0  # holds whose lease ended
    recovered: int = 0  # holds of an earlier run, settled at the start
    failed_batches: int = 0
    queued: int = 0
    clock_skew_s: int = 0  # how far the host's clock is off
    commit_ns: int = 0  # total time in commits
    commit_ns_max: int = 0


_Answer = tuple["Future[Any]", object]  # a result or an exception


class GroupCommit:
    """The ledger's inbox and threads. `start` before `submit`, `close` after.

    `applied` is called with each command and its result, `observe` with durable entries.
    """

    def __init__(
        self,
        store: LedgerStore,
        book: Callable[[], PriceBook],
        *,
        clock_ns: Callable[[], int],
        applied: Callable[[Command, object], None],
        observe: Callable[[Sequence[Entry]], None],
        tick: Callable[[], None],
    ) -> None:
        self._store = store
        self._book = book
        self._clock_ns = clock_ns
        self._applied = applied
        self._observe = observe
        self._tick = tick
        self._inbox = Inbox()
        self._turn = threading.Lock()  # its holder takes and applies a batch
        self._ticked_s = 0.0
        self._threads = [
            threading.Thread(target=self._run, name=f"ledger-{n}", daemon=True) for n in range(2)
        ]
        self._syncer = Syncer(store)
        self._counting = threading.Lock()  # guards the counters, which both threads change
        self._stats = LedgerStats()
        self.is_open = False

    def start(self) -> None:
        self._syncer.start()
        self._ticked_s = time.monotonic()
        for thread in self._threads:
            thread.start()
        self.is_open = True

    def close(self) -> None:
        """Finishes queued commands, then stops. Later commands fail with `LedgerClosed`."""
        if self.is_open:
            self.is_open = False
            self._inbox.end()
            for thread in self._threads:
                thread.join()
            self._inbox.refuse_rest()
            self._syncer.close()

    def stats(self) -> LedgerStats:
        return replace(self._stats, queued=len(self._inbox))

    def count(self, **more: int) -> None:
        """Adds to the counters. Any thread."""
        with self._counting:
            changes: dict[str, Any] = {k: getattr(self._stats, k) + n for k, n in more.items()}
            self._stats = replace(self._stats, **changes)

    def set_clock_skew(self, seconds: int) -> None:
        with self._counting:
            self._stats = replace(self._stats, clock_skew_s=seconds)

    def submit(self, command: Command) -> "Future[Any]":
        """Queues a command. Its future is done once the change is durable or has failed."""
        if not self.is_open:
            closed: Future[Any] = Future()
            closed.set_exception(LedgerClosed("the ledger is not running"))
            return closed
        future = self._inbox.put(command)
        if self._inbox.is_over:  # closed meanwhile
            self._inbox.refuse_rest()
        return future

    # -- the threads -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._inbox.is_over:
            with self._turn:
                self._take_turn()
            self._syncer.sync_waiting()

    def _take_turn(self) -> None:
        """Applies batches until there is something to sync or the ledger closes."""
        while not self._inbox.is_over:
            if self._take_batch():
                return

    def _take_batch(self) -> bool:
        """Applies a batch. Returns whether there is something to sync."""
        if time.monotonic() - self._ticked_s >= TICK_S:
            self._ticked_s = time.monotonic()
            self._tick()
        batch = self._inbox.take()
        return bool(batch) and self._commit(batch)

    def _commit(self, batch: list[Item]) -> bool:
        """Applies a batch. Holds are answered at once, commands that moved money once durable.

        Returns whether there are any of the latter.
        """
        began_ns = time.monotonic_ns()
        commands = [command for command, _ in batch]
        try:
            results, entries = self._store.apply(commands, self._book(), self._clock_ns, sync=False)
        except Exception as error:  # noqa: BLE001  the top of the thread: nothing was written
            return self._not_written(batch, error)
        self._note(commands, results, time.monotonic_ns() - began_ns)
        held: list[_Answer] = []
        moved: list[_Answer] = []
        for (command, future), result in zip(batch, results, strict=True):
            waits = self._store.syncs_apart and moves_money(command)
            (moved if waits else held).append((future, result))
        _answer(held)
        if moved:
            self._syncer.later(partial(self._durable, moved, entries))
        else:
            self._observe(entries)
        return bool(moved)

    def _durable(self, moved: list[_Answer], entries: list[Entry], error: Exception | None) -> None:
        """Answers a batch that has reached the disk or failed. Called for batches in order."""
        if error is not None:
            names = [f"{entry.tenant}/{entry.request_id}" for entry in entries]
            log.error("not known to be on the disk, correct what stands: %s", ", ".join(names))
            self.count(failed_batches=1)
            _answer([(future, error) for future, _ in moved])
            return
        _answer(moved)
        self._observe(entries)

    def _not_written(self, batch: list[Item], error: Exception) -> bool:
        """Fails the whole batch, or only the command that caused the error."""
        passing = isinstance(error, LedgerUnavailable) and not isinstance(error, Unwritable)
        if len(batch) > 1 and not passing:
            return sum(self._commit([item]) for item in batch) > 0
        if isinstance(error, LedgerUnavailable):  # it repeats until the store is back
            log.error("a batch of %d ledger commands was not written: %s", len(batch), error)
        else:
            log.error("a batch of %d ledger commands failed", len(batch), exc_info=error)
        self.count(failed_batches=1)
        if not isinstance(error, BillingError):
            cause, error = error, LedgerUnavailable(f"the ledger failed: {error}")
            error.__cause__ = cause
        for _, future in batch:
            future.set_exception(error)
        return False

    def _note(self, commands: list[Command], results: list[object], took_ns: int) -> None:
        for command, result in zip(commands, results, strict=True):
            self._applied(command, result)
        self.count(
            batches=1,
            commands=len(commands),
            refused=sum(isinstance(result, BillingError) for result in results),
            settled=sum(isinstance(r, Settled) and not r.repeated for r in results),
            commit_ns=took_ns,
        )
        with self._counting:
            slowest = max(self._stats.commit_ns_max, took_ns)
            self._stats = replace(self._stats, commit_ns_max=slowest)


def _answer(answers: Sequence[_Answer]) -> None:
    for future, result in answers:
        if isinstance(result, BillingError):
            future.set_exception(result)
        else:
            future.set_result(result)
