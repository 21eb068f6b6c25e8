"""Charges for pinned prefixes: each started hour once, or each started minute if the rate card
prices minutes.

An hour is charged when it begins, at the card and window of that instant. The request id is made of
the pin's name, its beginning and the hour's number. The ledger takes one charge for each id, so a
restart charges exactly what was missed. The card at the beginning of an hour decides whether its
minutes are charged instead. Event loop only. The cache operator settles before and after it changes
a pin, and `run` settles in between.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, floor
from typing import TypeVar

from api.admin.parts import Trail
from api.cache.explorer import Caller
from api.requests.metering import durable
from billing.errors import (
    BillingError,
    DuplicateRequest,
    InsufficientBalance,
    NoPrice,
    SpendLimitReached,
    TenantSuspended,
)
from billing.gate.holds import Hold, RequestContext
from billing.gate.outcomes import PRESUMED, Outcome
from billing.gate.work import SYSTEM
from billing.ledger import Ledger
from billing.prices.book import NS, PinnedRate, Terms
from billing.prices.rating import rate
from billing.store.reports import find_request
from billing.usage import Usage
from cachesvc.operator.scopes import Payer
from tiers.blocks.keys import PrefixKey
from tiers.operations.face import CacheOperations
from tiers.policy.retention import Pin

logger = logging.getLogger(__name__)

HOUR_S, MINUTE_S = 3600, 60
MINUTES = HOUR_S // MINUTE_S
LOOK_S = 60.0  # maximum between two checks: clocks jump, and a ledger may be unreachable
T = TypeVar("T")
Payers = Callable[[], Mapping[PrefixKey, Payer]]


@dataclass(frozen=True, slots=True)
class StoredTime:
    """One hour or minute of one pin, to charge to a tenant."""

    hold: Hold
    usage: Usage
    begins_s: float
    length_s: int

    @property
    def amount(self) -> int:
        return rate(self.usage, self.hold.pinned).amount


class StorageMeter:
    """Tracks which hours of which pins are settled.

    `pins` come from an earlier run's file. They include ended pins, whose last hours may be
    unsettled.
    """

    def __init__(
        self,
        call: Caller,
        ledger: Ledger,
        payers: Payers,
        record: Trail,
        *,
        pins: Iterable[Pin[PrefixKey]] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`payers` reads the accounts, so it is called off the event loop."""
        self._call = call
        self._ledger = ledger
        self._payers = payers
        self._record = record
        self._clock = clock
        self._known = _sold(pins)
        self._next: dict[str, int] = {}  # by pin: the first unsettled minute
        self._of_scope: Mapping[PrefixKey, Payer] = {}
        self._settling = asyncio.Lock()

    async def run(self) -> None:
        """Settles whenever an hour begins, until cancelled."""
        while True:
            try:
                await self.settle()
            except BillingError:
                logger.exception("storage of pins cannot be charged now; it will be")
            await asyncio.sleep(self._until_next_s())

    async def settle(self) -> Collection[str]:
        """Charges every started hour. Returns the names of pins released unpaid.

        Raises BillingError if the ledger fails; no charge is lost.
        """
        async with self._settling:
            pins = await self._look()
            unpaid = [pin for pin in pins if not await self._charge(pin)]
            for pin in unpaid:
                await self._release(pin)
            return [pin.name for pin in unpaid]

    def forget(self, name: str) -> None:
        """Forgets a pin that was ended early and whose hours are settled."""
        for known in [known for known, pin in self._known.items() if pin.name == name]:
            self._drop(known)

    async def _look(self) -> list[Pin[PrefixKey]]:
        """Pins with possibly unsettled hours. A pin that ended early was settled then."""
        standing = _sold(await self._on_engine(lambda cache: cache.pins()))
        self._known |= standing
        for known, pin in list(self._known.items()):
            if known not in standing and pin.until_s > self._clock():
                self._drop(known)
        pins = list(self._known.values())
        if any(pin.scope not in self._of_scope for pin in pins):
            self._of_scope = await asyncio.to_thread(self._payers)
        return pins

    async def _charge(self, pin: Pin[PrefixKey]) -> bool:
        """Settles the started part of a pin. Returns whether the current span is paid for."""
        known, now_s = pin_id(pin), self._clock()
        payer = self._of_scope.get(pin.scope)
        begun = spans_begun(pin, now_s, MINUTE_S)
        if payer is not None and begun > self._next.get(known, 0):
            first = self._next.get(known, 0)
            due = await asyncio.to_thread(self._due, pin, payer, range(first, begun))
            for span in due:
                runs = now_s < min(span.begins_s + span.length_s, pin.until_s)
                if not await self._post(span, prepaid=runs):
                    return False
        self._next[known] = begun
        if pin.until_s <= now_s:
            self._drop(known)
        return True

    def _due(self, pin: Pin[PrefixKey], payer: Payer, minutes: range) -> list[StoredTime]:
        """The sold and uncharged spans of `minutes`, in order. Worker thread.

        Charges are made in order, so it searches from the last one back to one that was charged.
        """
        tenant = self._ledger.accounts.find_tenant(payer.tenant)
        if tenant is None:
            return []
        due: list[StoredTime] = []
        begun = list(self._spans(pin, payer, tenant.currency, minutes))
        if not begun:
            return due
        with self._ledger.store.reading() as connection:
            for span in begun:
                charged = find_request(connection, *span.hold.key)
                if charged is not None and charged.details["outcome"] not in PRESUMED:
                    break
                due.append(span)
        return due[::-1]

    def _spans(
        self, pin: Pin[PrefixKey], payer: Payer, currency: str, minutes: range
    ) -> Iterator[StoredTime]:
        """The sold spans of `minutes`, last first."""
        for hour in reversed(range(minutes.start // MINUTES, -(-minutes.stop // MINUTES))):
            first = hour * MINUTES
            pinned = self._pinned(pin, payer, currency, first)
            if pinned is None:
                continue
            if pinned.rates.storage_minute is None:
                if pinned.rates.storage and first in minutes:
                    usage = Usage(storage_token_hours=pin.num_tokens)
                    yield _span(pin, payer, pinned, first, f"{hour}", usage, HOUR_S)
                continue
            usage = Usage(storage_token_minutes=pin.num_tokens)
            mine = range(max(first, minutes.start), min(first + MINUTES, minutes.stop))
            for minute in reversed(mine):
                now = self._pinned(pin, payer, currency, minute)
                if now is not None and now.rates.storage_minute:
                    number = f"{hour}.{minute % MINUTES:02}"
                    yield _span(pin, payer, now, minute, number, usage, MINUTE_S)

    def _pinned(
        self, pin: Pin[PrefixKey], payer: Payer, currency: str, minute: int
    ) -> PinnedRate | None:
        """The price at the beginning of a pin's minute."""
        terms, at_ns = Terms(tenant=payer.tenant), _begins_ns(pin, minute)
        try:
            return self._ledger.book.at(payer.model, at_ns, currency, terms)
        except NoPrice:
            return None

    async def _post(self, span: StoredTime, *, prepaid: bool) -> bool:
        """Charges a span. Returns False if the balance or a limit does not cover a current one.

        A past span was already provided, so a missing amount becomes debt.
        """
        hold = span.hold
        if prepaid:
            try:
                await durable(
                    self._ledger.reserve(
                        hold.tenant, hold.request_id, span.amount, hold.pinned, context=hold.context
                    )
                )
            except DuplicateRequest:
                pass  # reserved before a crash; settle it now
            except (InsufficientBalance, SpendLimitReached, TenantSuspended) as error:
                logger.warning(f"a pin's time could not be charged: {error}")
                return False
        await durable(self._ledger.settle(hold, span.usage, Outcome.FINISHED))
        return True

    async def _release(self, pin: Pin[PrefixKey]) -> None:
        """Ends an unpaid pin, durably, with an audit entry."""
        await self._on_engine(lambda cache: cache.unpin(pin.name))
        self._drop(pin_id(pin))
        await asyncio.wrap_future(await self._on_engine(lambda cache: cache.saved()))
        payer = self._of_scope[pin.scope]
        reason = f"tenant {payer.tenant!r} is suspended, or its balance or limit covers no more"
        after = {"tenant": payer.tenant, "num_tokens": pin.num_tokens, "until_s": pin.until_s}
        await asyncio.to_thread(
            self._record, "cache.unpin", pin.name, by=SYSTEM, after=after, reason=reason
        )

    def _drop(self, known: str) -> None:
        self._known.pop(known, None)
        self._next.pop(known, None)

    def _until_next_s(self) -> float:
        """Seconds until the next minute of a pin begins, at most LOOK_S."""
        now_s = self._clock()
        begin = (
            pin.since_s + spans_begun(pin, now_s, MINUTE_S) * MINUTE_S
            for pin in self._known.values()
        )
        return max(0.0, min([LOOK_S, *(at_s - now_s for at_s in begin)]))

    async def _on_engine(self, function: Callable[[CacheOperations], T]) -> T:
        return await asyncio.wrap_future(self._call(function))


def _sold(pins: Iterable[Pin[PrefixKey]]) -> dict[str, Pin[PrefixKey]]:
    """The chargeable pins by id. Pins of requests were paid for with their cache writes."""
    return {pin_id(pin): pin for pin in pins if not pin.kind.gives_way}


def pin_id(pin: Pin[PrefixKey]) -> str:
    """A permanent id of this pin. Pinning a prefix again under the same name makes a new pin."""
    return f"pin:{pin.name}:{round(pin.since_s * 1000)}"


def spans_begun(pin: Pin[PrefixKey], now_s: float, length_s: int) -> int:
    """The number of a pin's started hours or minutes. None starts at the pin's end."""
    until_now = floor((now_s - pin.since_s) / length_s) + 1
    return max(0, min(until_now, ceil((pin.until_s - pin.since_s) / length_s)))


def _begins_ns(pin: Pin[PrefixKey], minute: int) -> int:
    return int((pin.since_s + minute * MINUTE_S) * NS)


def _span(
    pin: Pin[PrefixKey],
    payer: Payer,
    pinned: PinnedRate,
    minute: int,
    number: str,
    usage: Usage,
    length_s: int,
) -> StoredTime:
    begins_ns = _begins_ns(pin, minute)
    context = RequestContext(admitted_ns=begins_ns)
    hold = Hold(payer.tenant, f"{pin_id(pin)}:{number}", pinned, context)
    return StoredTime(hold, usage, pin.since_s + minute * MINUTE_S, length_s)
