"""What this server may still give in holds of each busy tenant, without asking the store.

A tenant that takes many holds a second gets an advance: money that the database already holds for
this server (`billing.gate.advances`). A hold out of it is one comparison in memory, on any thread,
and is written behind the answer. Whatever may have changed since (a suspended tenant, a new limit,
a refusal, a lease that grows old) ends the draws until the store was asked again.

All commands go through the one queue of the ledger, so a question to the store comes behind every
draw that was made before it.
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

LEASE_S = 120  # of an advance; draws end after half of it
BUSY = 16  # holds between two looks of the ledger's sweeper, a second apart
AHEAD = 32  # holds of the largest size that an advance aims at


@dataclass(frozen=True, slots=True)
class Want:
    """What to ask of the store: to raise the advance towards `amount`, `anew` from nothing."""

    amount: int
    anew: bool


@dataclass(slots=True)
class _Tenant:
    """`left` is never more than what the store holds less the draws that are yet to be written."""

    currency: str = ""
    version: int = 0  # of the accounts when the advance was given
    left: int = 0
    ends_s: float = 0.0  # by the monotonic clock; no draws from then on
    largest: int = 0
    holds: int = 0  # since the sweeper looked
    is_asking: bool = False  # one question at a time; the store answers in the order asked
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
        """The hold, done at once where it can be drawn. `version` is the accounts'."""
        hold, currency = command.hold, command.hold.pinned.currency
        drawn = self._known.draw(hold.tenant, command.amount, currency, version)
        answer = self._submit(replace(command, drawn=drawn))
        if drawn:
            answer = self._ahead(hold, answer)
        self._raise(hold.tenant, currency, version)
        return answer

    def give_back_idle(self) -> None:
        """Give back what quiet tenants' advances hold."""
        for tenant in self._known.idle():
            self._give_back(tenant)

    def end(self) -> None:
        """Give everything back; nobody draws any more."""
        for tenant in self._known.end():
            self._give_back(tenant)

    def _ahead(self, hold: Hold, written: "Future[Any]") -> "Future[Any]":
        """The answer of a hold that is written behind it."""
        if written.done():  # the ledger is closed, or has too much to do
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
        else:  # asked again while the tenant stays quiet
            self._known.refused(tenant, asked=True)


class Known:
    """What memory knows of the advances. Whoever is told by `want`, `idle` or `end` to ask the
    store answers with `given`, `refused` or `returned`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}
        self._is_open = True

    def draw(self, tenant: str, amount: int, currency: str, version: int) -> bool:
        """Whether a hold of `amount` may be given now; it is taken off then."""
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
        """What to ask the store for now; None for nothing."""
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
        """The advance is in doubt: no draws until the store has given a new one."""
        with self._lock:
            found = self._tenants.setdefault(tenant, _Tenant())
            found.stop()
            if asked:
                found.is_asking = False

    def idle(self) -> list[str]:
        """The tenants that took no hold since the last call and have something to give back."""
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
        """The tenants that have something to give back; nobody draws any more."""
        with self._lock:
            self._is_open = False
            for found in self._tenants.values():
                found.stop()
            return [name for name, t in self._tenants.items() if t.has_row or t.is_asking]
