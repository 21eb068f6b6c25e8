"""Makes the ledger's commits durable, and keeps the WAL short.

A ledger thread commits without waiting for the disk, registers commands that moved money with
`later`, and then syncs the log itself (`sync_waiting`). One sync serves all waiting commands. If
another thread is syncing, it takes over the rest. So neither holds nor the next batch wait for the
disk; they reach it with the next sync, within a second. If the store's own commits are durable,
this class is not used.

Copying the log into the database (a checkpoint) is slow and happens on a thread of its own.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from billing.errors import LedgerUnavailable
from billing.store.store import LedgerStore

log = logging.getLogger(__name__)

CHECKPOINT_S = 0.5  # interval of checks on the log
UNSYNCED_S = 0.5  # longest wait of holds and progress for a sync while no money moves

Done = Callable[[Exception | None], None]  # called with None once durable, else with the error


class Syncer:
    """Call `start` before use, and `close` after the last other call."""

    def __init__(self, store: LedgerStore) -> None:
        self._store = store
        self._waiting: deque[Done] = deque()
        self._syncing = threading.Lock()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._sync_rest, name="ledger-sync", daemon=True),
            threading.Thread(target=self._keep_short, name="ledger-checkpoint", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stops after all waiting commits are durable."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._sync()

    def later(self, done: Done) -> None:
        """Calls `done` after the next sync, in order. Call `sync_waiting` next."""
        self._waiting.append(done)

    def sync_waiting(self) -> None:
        """Syncs and answers what waits, unless another thread is doing so.

        That thread checks again when it is done, so nothing is left behind.
        """
        while self._waiting and self._syncing.acquire(blocking=False):
            try:
                self._sync()
            finally:
                self._syncing.release()

    def _sync(self) -> None:
        waiting: list[Done] = []
        while self._waiting:
            waiting.append(self._waiting.popleft())
        error = self._sync_once() if waiting or self._store.unsynced else None
        for done in waiting:
            done(error)

    def _sync_once(self) -> Exception | None:
        try:
            self._store.sync()
        except Exception as error:  # noqa: BLE001  passed to all that wait
            _report("the ledger's log cannot be synced", error)
            if isinstance(error, LedgerUnavailable):
                return error
            return LedgerUnavailable(f"the ledger cannot be written: {error}")
        return None

    def _sync_rest(self) -> None:
        """Syncs commits that no settlement has synced."""
        while not self._closing.wait(UNSYNCED_S):
            if self._store.unsynced:
                with self._syncing:
                    self._sync()
                self.sync_waiting()

    def _keep_short(self) -> None:
        while not self._closing.wait(CHECKPOINT_S):
            try:
                self._store.checkpoint()
            except Exception as error:  # noqa: BLE001  the top of the thread: nothing is lost
                _report("the ledger's log grows: it cannot be copied into its database", error)


def _report(what: str, error: Exception) -> None:
    """Logs the fault of a disk as a sentence, and anything else with its traceback."""
    expected = isinstance(error, OSError | LedgerUnavailable)
    log.error("%s: %s", what, error, exc_info=None if expected else error)
