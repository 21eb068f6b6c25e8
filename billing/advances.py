"""Advances: amounts that this server may give as holds without asking the store.

A tenant with many holds a second gets an advance: money that the database already holds for this
server (`billing.gate.advances`). A hold from it is one comparison in memory, on any thread, and is
written after the answer. Any possible change (a suspended tenant, a new limit, a refusal, an old
lease) stops draws until the store has been asked again.

All commands go through the ledger's one queue, so a request to the store comes after every earlier
draw.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from billing.gate.commands import Allot, Command, Reserve
from billing.gate.holds import Hold
from billing.prices.book import NS

log = logging.getLogger(__name__)

LEASE_S = 120  # of an advance; draws stop after half of it
BUSY = 16  # holds between two runs of the ledger's sweeper, a second apart
AHEAD = 32  # target size of an advance, in holds of the largest size


@dataclass(frozen=True, slots=True)
class Want:
    """A request to raise an advance towards `amount`; `anew`: from nothing."""

    amount: int
    anew: bool


@dataclass(slots=True)
class _Tenant:
    """`left` never exceeds the amount held in the store minus the unwritten draws."""

    currency: str = ""
    version: int = 0  # of the accounts, when the advance was given
    left: int = 0
    ends_s: float = 0.0  # by the monotonic clock; no draws after it
    largest: int = 0
    holds: int = 0  # since the sweeper's last run
    is_asking: bool = False  # one request at a time; the store answers in order
    has_row: bool = False

    def stop(self) -> None:
        self.left, self.ends_s = 0, 0.0


class Advances:
    """The advances of one run of a server. Thread-safe."""

    def __init__(
        self,
        submit: Callable[[Command], "Future[Any]"],
        *,
        owner: str,
        boot: str,
        clock_ns: Callable[[], int],
    ) -> None:
        self._submit = submit
        self._run = (owner, boot)
        self._clock_ns = clock_ns
        self._known = Known()

    def reserve(self, command: Reserve, version: int) -> "Future[Hold]":
        """The hold, done at once if it can be drawn. `version` is the accounts' version."""
        hold, currency = command.hold, command.hold.pinned.currency
        drawn = self._known.draw(hold.tenant, command.amount, currency, version)
        answer = self._submit(replace(command, drawn=drawn))
        if drawn:
            answer = self._ahead(hold, answer)
        self._raise(hold.tenant, currency, version)
        return answer

    def give_back_idle(self) -> None:
        """Returns the advances of idle tenants to the store."""
        for tenant in self._known.idle():
            self._give_back(tenant)

    def end(self) -> None:
        """Returns all advances to the store and stops draws."""
        for tenant in self._known.end():
            self._give_back(tenant)

    def _ahead(self, hold: Hold, written: "Future[Any]") -> "Future[Any]":
        """The immediate answer for a hold that is written later."""
        if written.done():  # the ledger is closed or its queue is full
            return written
        written.add_done_callback(partial(self._check_written, hold))
        answer: Future[Any] = Future()
        answer.set_result(hold)
        return answer

    def _check_written(self, hold: Hold, written: "Future[Any]") -> None:
        if (error := written.exception()) is not None:
            log.warning("request %s runs without its hold: %s", hold.request_id, error)
            self._known.refused(hold.tenant)

    def _raise(self, tenant: str, currency: str, version: int) -> None:
        want = self._known.want(tenant)
        if want is None:
            return
        if want.anew:
            self._submit(Allot(tenant, *self._run, 0))
        ends_s = time.monotonic() + LEASE_S // 2
        expires_ns = self._clock_ns() + LEASE_S * NS

        def answered(allotted: "Future[Any]") -> None:
            more = 0 if allotted.exception() else allotted.result()
            if more:
                self._known.given(tenant, more, ends_s, currency, version)
            else:
                self._known.refused(tenant)
                self._give_back(tenant)

        command = Allot(tenant, *self._run, want.amount, expires_ns)
        self._submit(command).add_done_callback(answered)

    def _give_back(self, tenant: str) -> None:
        self._submit(Allot(tenant, *self._run, 0)).add_done_callback(
            partial(self._returned, tenant)
        )

    def _returned(self, tenant: str, written: "Future[Any]") -> None:
        if written.exception() is None:
            self._known.returned(tenant)
        else:  # asked again while the tenant stays idle
            self._known.refused(tenant, asked=True)


class Known:
    """The advances in memory.

    `want`, `idle` and `end` say what to ask the store. The caller reports the answer with `given`,
    `refused` or `returned`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}
        self._is_open = True

    def draw(self, tenant: str, amount: int, currency: str, version: int) -> bool:
        """Takes `amount` from the advance. Returns False if no hold may be given now."""
        with self._lock:
            found = self._tenants.setdefault(tenant, _Tenant())
            found.holds += 1
            found.largest = max(found.largest, amount)
            if (found.currency, found.version) != (currency, version):
                found.stop()
            if found.ends_s <= time.monotonic() or amount > found.left:
                return False
            found.left -= amount
            return True

    def want(self, tenant: str) -> Want | None:
        """The request to send to the store now, if any."""
        with self._lock:
            found = self._tenants.setdefault(tenant, _Tenant())
            most = found.largest * AHEAD
            over = found.ends_s <= time.monotonic()
            is_busy = found.has_row or found.holds >= BUSY
            full = 2 * found.left >= most and not over
            if not self._is_open or found.is_asking or full or not is_busy:
                return None
            if over:
                found.stop()
            found.is_asking = True
            return Want(most, anew=over and found.has_row)

    def given(self, tenant: str, more: int, ends_s: float, currency: str, version: int) -> None:
        with self._lock:
            found = self._tenants.setdefault(tenant, _Tenant())
            found.is_asking, found.has_row = False, True
            found.left += more
            found.ends_s, found.currency, found.version = ends_s, currency, version

    def refused(self, tenant: str, *, asked: bool = False) -> None:
        """The advance is uncertain: stops draws until the store has given a new one."""
        with self._lock:
            found = self._tenants.setdefault(tenant, _Tenant())
            found.stop()
            if asked:
                found.is_asking = False

    def idle(self) -> list[str]:
        """The tenants without a hold since the last call that have an advance to return."""
        with self._lock:
            quiet = {n: t for n, t in self._tenants.items() if not t.holds and not t.is_asking}
            for name, found in quiet.items():
                found.stop()
                found.is_asking = found.has_row
                if not found.has_row:
                    del self._tenants[name]
            for found in self._tenants.values():
                found.holds = 0
            return [name for name, found in quiet.items() if found.has_row]

    def returned(self, tenant: str) -> None:
        with self._lock:
            self._tenants.pop(tenant, None)

    def end(self) -> list[str]:
        """The tenants that have an advance to return. Stops draws."""
        with self._lock:
            self._is_open = False
            for found in self._tenants.values():
                found.stop()
            return [name for name, t in self._tenants.items() if t.has_row or t.is_asking]
