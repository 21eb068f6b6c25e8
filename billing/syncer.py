"""Makes what the ledger thread wrote durable, on a thread of its own, and keeps the WAL short.

The ledger thread commits without waiting for the disk and hands over what moved money; this thread
syncs the log and then says `done`, in order, one sync for all that waits. So holds never wait for
the disk, nor does the next batch; they reach it with the next sync, within a second. Where the
store's own commit is durable nothing comes here.

Copying the log into the database (a checkpoint) is slow and happens on a second thread.
"""

import logging
import queue
import threading
from collections.abc import Callable

from billing.errors import LedgerUnavailable
from billing.store.store import LedgerStore

log = logging.getLogger(__name__)

CHECKPOINT_S = 0.5  # how often the log is looked at
UNSYNCED_S = 0.5  # the longest that holds and progress wait for a sync where no money moves

Done = Callable[[Exception | None], None]  # told None once durable, else what went wrong


class Syncer:
    """`start` before use, `close` after. `later` is called by the ledger thread alone."""

    def __init__(self, store: LedgerStore) -> None:
        self._store = store
        self._waiting: queue.SimpleQueue[Done | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._sync, name="ledger-sync", daemon=True),
            threading.Thread(target=self._keep_short, name="ledger-checkpoint", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """After what waits has been made durable."""
        self._closing.set()
        self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def later(self, done: Done) -> None:
        self._waiting.put(done)

    def _sync(self) -> None:
        running = True
        while running:
            batch = self._next_batch()
            waiting = [done for done in batch if done is not None]
            running = len(waiting) == len(batch)
            error = self._sync_once() if waiting or self._store.unsynced else None
            for done in waiting:
                done(error)

    def _next_batch(self) -> list[Done | None]:
        """All that waits; nothing, where nothing came for a while."""
        batch: list[Done | None] = []
        try:
            batch.append(self._waiting.get(timeout=UNSYNCED_S))
            while True:
                batch.append(self._waiting.get_nowait())
        except queue.Empty:
            return batch

    def _sync_once(self) -> Exception | None:
        try:
            self._store.sync()
        except Exception as error:  # the top of the thread: told to all that wait
            log.exception("the ledger's log cannot be synced")
            if isinstance(error, LedgerUnavailable):
                return error
            return LedgerUnavailable(f"the ledger cannot be written: {error}")
        return None

    def _keep_short(self) -> None:
        while not self._closing.wait(CHECKPOINT_S):
            try:
                self._store.checkpoint()
            except Exception:  # the top of the thread; the log grows, and nothing is lost
                log.exception("the ledger's log could not be copied into its database")
