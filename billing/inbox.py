"""The queue of commands for the ledger's thread, and their grouping into transactions.

Bounded. Any thread may `put`; one at a time may `take`. A command whose future is cancelled before
it is taken is not applied.
"""

import queue
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from billing.errors import LedgerClosed, LedgerUnavailable
from billing.gate.commands import Command
from billing.sweeper import BATCH_LIMIT

QUEUE_LIMIT = 65_536
WAIT_S = 1.0  # the longest wait of `take`

Item = tuple[Command, "Future[Any]"]


class Inbox:
    """`is_over` is set once the end was taken: the inbox is empty and stays empty."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self.is_over = False

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, command: Command) -> "Future[Any]":
        future: Future[Any] = Future()
        if self._queue.qsize() < QUEUE_LIMIT:
            self._queue.put((command, future))
        else:
            future.set_exception(LedgerUnavailable("too many ledger commands wait; try later"))
        return future

    def end(self) -> None:
        """Ends the inbox. Earlier commands are still taken."""
        self._queue.put(None)

    def refuse_rest(self) -> None:
        """Fails the commands that came after the end."""
        with suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if item is not None and item[1].set_running_or_notify_cancel():
                    item[1].set_exception(LedgerClosed("the ledger was closed"))

    def take(self) -> list[Item]:
        """All waiting commands, up to the limit; empty if nothing came within WAIT_S."""
        items: list[Item] = []
        with suppress(queue.Empty):
            item = self._queue.get(timeout=WAIT_S)
            while item is not None:
                if item[1].set_running_or_notify_cancel():
                    items.append(item)
                if len(items) >= BATCH_LIMIT:
                    return items
                item = self._queue.get_nowait()
            self.is_over = True
        return items
