"""Ends holds of earlier runs, holds with expired leases, and expired grants.

Used by the ledger, on its thread between batches. It uses ordinary commands.
"""

import logging
import time
from collections.abc import Callable, Sequence

from billing.errors import BillingError
from billing.gate.commands import Command, Expire, Reap
from billing.gate.entries import Entry
from billing.gate.outcomes import Outcome
from billing.gate.work import Settled
from billing.prices.book import PriceBook
from billing.store import expiring as store_expiring
from billing.store.store import LedgerStore

log = logging.getLogger(__name__)

BATCH_LIMIT = 512  # of commands in one transaction


class Sweeper:
    """Sweeps one server's holds. `leases` has the end of each, by the monotonic clock."""

    def __init__(
        self,
        store: LedgerStore,
        book: Callable[[], PriceBook],
        leases: dict[tuple[str, str], float],
        *,
        owner: str,
        boot: str,
        clock_ns: Callable[[], int],
        observe: Callable[[Sequence[Entry]], None],
    ) -> None:
        self._store = store
        self._book = book
        self._leases = leases
        self._owner = owner
        self._boot = boot
        self._clock_ns = clock_ns
        self._observe = observe

    def recover(self) -> int:
        """Settles the holds of this server's earlier runs from their recorded progress.

        Returns their number.
        """
        stale = [
            Reap(hold.tenant, hold.request_id, Outcome.CRASHED, None)
            for hold in self._store.all_holds()
            if hold.owner == self._owner and hold.boot != self._boot
        ]
        starts = range(0, len(stale), BATCH_LIMIT)
        done = sum(self._reap(stale[start : start + BATCH_LIMIT]) for start in starts)
        if stale:
            log.warning("settled %d requests that an earlier run left unfinished", len(stale))
        return done

    def sweep(self) -> int:
        """Ends holds with expired leases and returns their number.

        Our own holds are timed by the monotonic clock, so a jump of the wall clock does not end the
        hold of a running request.
        """
        now_ns, now = self._clock_ns(), time.monotonic()
        ended = [
            Reap(hold.tenant, hold.request_id, Outcome.LAPSED, None if mine else now_ns)
            for hold in self._store.all_holds()
            for mine in [hold.boot == self._boot]
            if (self._leases.get(hold.key, 0.0) <= now if mine else hold.expires_ns <= now_ns)
        ]
        for key, ends in list(self._leases.items()):  # including those never held
            if ends <= now:
                self._leases.pop(key, None)
        return self._reap(ended) if ended else 0

    def expire(self) -> int:
        """Ends expired grants and returns their number."""
        now_ns = self._clock_ns()
        with self._store.reading() as connection:
            due = store_expiring.due_grants(connection, now_ns, BATCH_LIMIT)
        if not due:
            return 0
        commands = [Expire(*grant) for grant in due]
        return len(self._apply(commands, "a grant cannot be ended: %s")[1])

    def _reap(self, commands: list[Reap]) -> int:
        """Settles these holds. One that cannot be read does not stop the others."""
        try:
            results, _ = self._apply(commands, "a hold cannot be settled: %s")
        except (ValueError, KeyError, TypeError) as error:
            if len(commands) > 1:
                return sum(self._reap([command]) for command in commands)
            log.error("a hold cannot be read: %s", commands[0], exc_info=error)
            return 0
        return sum(isinstance(result, Settled) for result in results)

    def _apply(self, commands: Sequence[Command], failing: str) -> tuple[list[object], list[Entry]]:
        results, entries = self._store.apply(commands, self._book(), self._clock_ns)
        self._observe(entries)
        for result in results:
            if isinstance(result, BillingError):
                log.error(failing, result)
        return results, entries
