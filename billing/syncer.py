"""Makes what the ledger's threads wrote durable, and keeps the WAL short.

A thread of the ledger commits without waiting for the disk, leaves word `later` of what moved
money, and then syncs the log itself: `sync_waiting`. One sync serves all that waits; who comes
while another thread syncs leaves it to that one. So holds never wait for the disk, nor does the
next batch; they reach it with the next sync, within a second. Where the store's own commit is
durable nothing comes here.

Copying the log into the database (a checkpoint) is slow and happens on a thread of its own.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from billing.errors import LedgerUnavailable
from billing.store.store import LedgerStore

log = logging.getLogger(__name__)

CHECKPOINT_S = 0.5  # how often the log is looked at
UNSYNCED_S = 0.5  # the longest that holds and progress wait for a sync where no money moves

Done = Callable[[Exception | None], None]  # told None once durable, else what went wrong


class Syncer:
    """`start` before use, `close` after, when nobody calls the others any more."""

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
        """After what waits has been made durable."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._sync()

    def later(self, done: Done) -> None:
        """Call `done` after the next sync, in order. `sync_waiting` is to follow."""
        self._waiting.append(done)

    def sync_waiting(self) -> None:
        """Sync what waits and tell it, where no other thread is about it. That one looks again
        when it is done, so nothing stays behind."""
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
        except Exception as error:  # told to all that wait
            log.exception("the ledger's log cannot be synced")
            if isinstance(error, LedgerUnavailable):
                return error
            return LedgerUnavailable(f"the ledger cannot be written: {error}")
        return None

    def _sync_rest(self) -> None:
        """What no settlement brought to the disk."""
        while not self._closing.wait(UNSYNCED_S):
            if self._store.unsynced:
                with self._syncing:
                    self._sync()
                self.sync_waiting()

    def _keep_short(self) -> None:
        while not self._closing.wait(CHECKPOINT_S):
            try:
                self._store.checkpoint()
            except Exception:  # the top of the thread; the log grows, and nothing is lost
                log.exception("the ledger's log could not be copied into its database")
