"""The queue of commands for the ledger's thread, and their grouping into transactions.

Bounded. Any thread may `put`; one at a time may `take`. A command whose future is cancelled before
it is taken is not applied.

A hold from an advance is answered at once, so nobody waits for its writing. Such holds are written
`BEHIND_S` later, many in one transaction, or together with a command that may depend on them.
"""

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from billing.errors import LedgerClosed, LedgerUnavailable
from billing.gate.commands import Command, Reserve, Settle, fingerprint_of
from billing.sweeper import BATCH_LIMIT

QUEUE_LIMIT = 65_536
WAIT_S = 1.0  # the longest wait of `take`
BEHIND_S = 0.01

Item = tuple[Command, "Future[Any]"]


class Inbox:
    """`is_over` is set once the end was taken: the inbox is empty and stays empty."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._behind: list[Item] = []  # unwritten drawn holds
        self._due_s = 0.0  # when the first of them is due, by the monotonic clock
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
        """The next batch; empty if nothing came within WAIT_S."""
        came = self._come() if len(self._behind) < BATCH_LIMIT else []
        if not self.is_over and not self._is_due() and _can_overtake(came, self._behind):
            now = [item for item in came if isinstance(item[0], Settle)]
            self._keep_behind([item for item in came if not isinstance(item[0], Settle)])
            return now
        batch, self._behind = self._behind + came, []
        return batch

    def _come(self) -> list[Item]:
        """All waiting commands, up to the limit."""
        items: list[Item] = []
        wait_s = self._due_s - self._clock() if self._behind else WAIT_S
        with suppress(queue.Empty):
            item = self._queue.get(timeout=max(0.0, wait_s))
            while item is not None:
                if item[1].set_running_or_notify_cancel():
                    items.append(item)
                if len(items) + len(self._behind) >= BATCH_LIMIT:
                    return items
                item = self._queue.get_nowait()
            self.is_over = True
        return items

    def _is_due(self) -> bool:
        is_full = len(self._behind) >= BATCH_LIMIT
        return is_full or (bool(self._behind) and self._clock() >= self._due_s)

    def _keep_behind(self, items: Sequence[Item]) -> None:
        if items and not self._behind:
            self._due_s = self._clock() + BEHIND_S
        self._behind += items


def _can_overtake(came: Sequence[Item], behind: Sequence[Item]) -> bool:
    """Whether all new commands are drawn holds, or settlements of requests with written holds."""
    held = {command.hold.key for command, _ in (*behind, *came) if isinstance(command, Reserve)}
    for command, _ in came:
        if isinstance(command, Reserve) and command.drawn:
            continue
        if not isinstance(command, Settle) or command.hold.key in held:
            return False
        if fingerprint_of(command) is not None:  # it affects running requests
            return False
    return True
