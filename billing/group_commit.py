"""Group commit: one thread that applies all commands that wait in one transaction.

It takes up to `BATCH_LIMIT` at a time. What moved money is answered once it is durable, by
`billing.syncer` where the disk is waited for apart; the thread goes on with the next batch
meanwhile. Between batches it calls the ledger's `tick`.

The queue is bounded; when it is full a command fails at once with `LedgerUnavailable`. A command
whose future was cancelled before the thread took it is not applied.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from billing.errors import (
    BillingError,
    LedgerClosed,
    LedgerUnavailable,
    Unwritable,
)
from billing.gate.commands import Command, moves_money
from billing.gate.entries import Entry
from billing.gate.work import Settled
from billing.prices.book import PriceBook
from billing.store.store import LedgerStore
from billing.sweeper import BATCH_LIMIT
from billing.syncer import Syncer

log = logging.getLogger(__name__)

QUEUE_LIMIT = 65_536
TICK_S = 1.0


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


_Item = tuple[Command, "Future[Any]"]
_Answer = tuple["Future[Any]", object]  # a result, or the exception that it is


class GroupCommit:
    """The ledger's queue and thread. `start` before `submit`, `close` after.

    `applied` is told each command and its result; `observe`, the entries once they are durable.
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
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._syncer = Syncer(store)
        self._counting = threading.Lock()  # of the counters: both threads count
        self._stats = LedgerStats()
        self.is_open = False

    def start(self) -> None:
        self._syncer.start()
        self._thread.start()
        self.is_open = True

    def close(self) -> None:
        """Finish what is queued, then stop. Later commands fail with `LedgerClosed`."""
        if self.is_open:
            self.is_open = False
            self._queue.put(None)
            self._thread.join()
            self._refuse_rest()
            self._syncer.close()

    def stats(self) -> LedgerStats:
        return replace(self._stats, queued=self._queue.qsize())

    def count(self, **more: int) -> None:
        """Add to the counters. Any thread."""
        with self._counting:
            changes: dict[str, Any] = {k: getattr(self._stats, k) + n for k, n in more.items()}
            self._stats = replace(self._stats, **changes)

    def set_clock_skew(self, seconds: int) -> None:
        with self._counting:
            self._stats = replace(self._stats, clock_skew_s=seconds)

    def submit(self, command: Command) -> "Future[Any]":
        """Queue a command; its future is done once the change is durable, or has failed."""
        future: Future[Any] = Future()
        if not self.is_open:
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

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        ticked = time.monotonic()
        running = True
        while running:
            batch, running = self._next_batch()
            if batch:
                self._commit(batch)
            if time.monotonic() - ticked >= TICK_S:
                ticked = time.monotonic()
                self._tick()

    def _next_batch(self) -> tuple[list[_Item], bool]:
        """All that waits, up to the limit; False when the ledger is closing."""
        batch: list[_Item] = []
        try:
            item = self._queue.get(timeout=TICK_S)
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
            results, entries = self._store.apply(commands, self._book(), self._clock_ns, sync=False)
        except Exception as error:  # noqa: BLE001  the top of the thread: nothing was written
            self._not_written(batch, error)
            return
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

    def _durable(self, moved: list[_Answer], entries: list[Entry], error: Exception | None) -> None:
        """Sync thread: a batch has reached the disk, or has not."""
        if error is not None:
            names = [f"{entry.tenant}/{entry.request_id}" for entry in entries]
            log.error("not known to be on the disk, correct what stands: %s", ", ".join(names))
            self.count(failed_batches=1)
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
        if passing:  # it says why, and would say so for each request until the store is back
            log.error("a batch of %d ledger commands was not written: %s", len(batch), error)
        else:
            log.error("a batch of %d ledger commands failed", len(batch), exc_info=error)
        self.count(failed_batches=1)
        self._fail(batch, error)

    def _fail(self, batch: list[_Item], error: Exception) -> None:
        if not isinstance(error, BillingError):
            cause, error = error, LedgerUnavailable(f"the ledger failed: {error}")
            error.__cause__ = cause
        for _, future in batch:
            future.set_exception(error)

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
