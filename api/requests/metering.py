"""Metering of one request: a charge is opened before work and always settled or voided.

A charge opens with a hold for the whole prompt at its highest price and one slice of output. During
decode the next slice is held before it is needed, so decode waits only for a slow ledger. Output
that no slice covers is neither delivered nor billed.

The hold is a lease. Each slice renews it, and so does `cover` while the engine is silent. `settle`
or `void` ends the hold, however the request ends. After a crash the ledger settles the hold from
the progress reported with the last slice. Event loop only; the ledger has its own thread.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from api.errors import GenerationFailed
from api.job import Bill, Job, Priced, Served
from billing.errors import GateError, InsufficientBalance, SpendLimitReached, UnknownHold
from billing.gate.holds import Hold
from billing.gate.work import SYSTEM, Settled
from billing.keys import Principal
from billing.ledger import DEFAULT_TTL_S, Ledger
from billing.money import format_units
from billing.prices.book import PinnedRate, Terms
from billing.prices.rating import hold_amount, rate, short_hits
from billing.usage import Usage

Made = TypeVar("Made")
Receipts = Callable[[Settled], Mapping[str, Any]]

SLICE_TOKENS = 256  # output tokens of one choice held at a time
RENEWALS_PER_LEASE = 4
LAPSED = "The hold of this request was not renewed in time."


class LedgerMeter:
    """Opens charges on a running ledger. `receipts` signs the receipt of a settled request."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        slice_tokens: int = SLICE_TOKENS,
        lease_s: int = DEFAULT_TTL_S,
        receipts: Receipts | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._ledger = ledger
        self._slice_tokens = slice_tokens
        self._lease_s = lease_s
        self._receipts = receipts
        self._clock_ns = clock_ns

    def check(self) -> None:
        """Raises LedgerUnavailable if no charge can be opened, before limits count the request."""
        self._ledger.check()

    async def admit(self, principal: Principal, job: Job) -> "LedgerCharge":
        """Fixes the current price and takes the first hold.

        Raises InsufficientBalance if the balance does not cover it, and SpendLimitReached.
        """
        now_ns = self._clock_ns()  # one instant, so the proof finds the same window as the price
        pinned = self._pinned(principal, job, now_ns)
        slice_tokens = job.max_output
        if not job.held_whole:
            slice_tokens = min(self._slice_tokens * job.num_choices, job.max_output)
        amount = hold_amount(pinned, prompt_tokens=job.prompt_tokens, output_tokens=slice_tokens)
        reserved = self._ledger.reserve(
            principal.tenant,
            job.request_id,
            amount,
            pinned,
            context=replace(job.context, admitted_ns=now_ns),
            ttl_s=self._lease_s,
        )
        try:
            hold = await durable(reserved)
        except asyncio.CancelledError:  # the server closes the connection: nobody will settle this
            reserved.cancel()
            reserved.add_done_callback(self._let_go)
            raise
        repin = partial(self._repinned, principal, job, now_ns, pinned)
        return LedgerCharge(
            self._ledger,
            hold,
            covered=slice_tokens,
            most=job.max_output,
            lease_s=self._lease_s,
            receipts=self._receipts,
            repin=repin if job.prompt_most else None,
        )

    def price(self, principal: Principal, job: Job, usage: Usage) -> Priced:
        """The price of the prompt by `usage`, and of the largest output. Raises NoPrice."""
        pinned = self._pinned(principal, job, self._clock_ns())
        prompt = rate(usage, pinned).amount
        whole = rate(replace(usage, output=job.max_output), pinned).amount
        return Priced(pinned.currency, prompt, whole - prompt, pinned.ref)

    def rate_of(self, principal: Principal, model: str) -> PinnedRate:
        """The rate of a short prompt now. Raises NoPrice."""
        return self._at(principal, model, self._clock_ns(), Terms(tenant=principal.tenant))

    def _pinned(self, principal: Principal, job: Job, now_ns: int) -> PinnedRate:
        terms = _terms(principal, job, job.longest_prompt)
        return self._at(principal, job.model.name, now_ns, terms)

    def _at(self, principal: Principal, model: str, now_ns: int, terms: Terms) -> PinnedRate:
        return self._ledger.book.at(model, now_ns, principal.currency or None, terms)

    def _repinned(
        self, principal: Principal, job: Job, now_ns: int, was: PinnedRate, prompt: int
    ) -> PinnedRate:
        """The price on the same card for a prompt whose length is known by now."""
        card = self._ledger.book.card(was.ref.card, was.ref.version)
        return card.at(job.model.name, now_ns, _terms(principal, job, prompt))

    def _let_go(self, reserved: "Future[Hold]") -> None:
        """Releases a hold taken for a request that has already ended. Ledger thread."""
        if not reserved.cancelled() and reserved.exception() is None:
            self._ledger.void(reserved.result())


class LedgerCharge:
    """One request's money. `settle` or else `void` ends it.

    `refusal` is why no more tokens are covered: InsufficientBalance or SpendLimitReached.
    """

    def __init__(
        self,
        ledger: Ledger,
        hold: Hold,
        *,
        covered: int,
        most: int,
        lease_s: int,
        receipts: Receipts | None,
        repin: Callable[[int], PinnedRate] | None = None,
    ) -> None:
        """`repin` gives the price by a prompt's length, which was only bounded at admission."""
        self._ledger = ledger
        self._hold = hold
        self._repin = repin
        self._slice = covered
        self._covered = covered
        self._most = most
        self._lease_s = lease_s
        self._receipts = receipts
        self._asked: asyncio.Future[int] | None = None  # the requested slice
        self._asked_tokens = 0
        self.refusal: GateError | None = None
        self._ended = False
        self._renew_at = time.monotonic() + lease_s / RENEWALS_PER_LEASE

    async def cover(self, output_tokens: int, progress: Callable[[], Usage]) -> int:
        """How many of `output_tokens` are paid for.

        `progress` returns what has been sent so far, for settling after a crash.
        """
        while True:
            self._take_in()
            if output_tokens + self._slice // 2 >= self._covered or self._lease_is_old:
                self._ask(progress)
            if output_tokens <= self._covered or self._asked is None:
                return min(output_tokens, self._covered)
            await asyncio.wait([self._asked])

    def exceed(self, output_tokens: int) -> None:
        """An engine elsewhere gave more output than was asked for at most."""
        self._slice = max(self._slice, output_tokens - self._covered)
        self._most = max(self._most, output_tokens)

    async def cover_prompt(self, tokens: int, held: int, progress: Callable[[], Usage]) -> bool:
        """Whether a prompt of this length is paid for, which an engine elsewhere counted after less
        was `held`."""
        was, output = self._hold.pinned, self._covered
        pinned = self._repin(tokens) if self._repin else was
        amount = hold_amount(pinned, prompt_tokens=tokens, output_tokens=output)
        more = max(0, amount - hold_amount(was, prompt_tokens=held, output_tokens=output))
        usage, lease_s = progress(), self._lease_s
        try:
            await durable(self._ledger.top_up(self._hold, more, usage=usage, ttl_s=lease_s))
        except (InsufficientBalance, SpendLimitReached):
            return False
        except UnknownHold:
            raise GenerationFailed(LAPSED) from None
        self._hold = replace(self._hold, pinned=pinned)
        return True

    @property
    def service_tier(self) -> str:
        """The requested service tier, if its price is the request's; else empty."""
        tier = self._hold.context.service_tier
        return tier if tier in self._hold.pinned.ref.terms else ""

    def refuses(self, usage: Usage) -> bool:
        """Whether the card does not sell an answer whose prompt is unreported."""
        return bool(usage.unreported) and self._hold.pinned.rates.unreported is None

    async def settle(self, served: Served, *, delivered: bool) -> Bill:
        """Posts the cost of `served` and releases the rest of the hold; durable on return.

        `delivered` is False only if no byte of the answer reached the client.
        """
        self._ended = True
        await self._let_slice_end()
        if self._repin is not None and served.usage.prompt:
            pinned = self._repin(served.usage.prompt)
            self._hold = replace(self._hold, pinned=pinned)
        usage, outcome = served.usage, served.outcome
        settling = self._ledger.settle(self._hold, usage, outcome, delivered=delivered)
        settled = await durable(settling)
        charge, ref = settled.charge, self._hold.pinned.ref
        return Bill(
            settled.usage,
            currency=charge.currency,
            cost=format_units(charge.amount),
            saved=format_units(charge.saved),
            price_version=f"{ref.card} {ref.version}",
            service_tier=self.service_tier,
            rate=ref,
            lines=charge.lines,
            note=short_hits(settled.usage, self._hold.pinned),
            receipt=partial(self._receipts, settled) if self._receipts else None,
        )

    async def lost(self, served: Served) -> None:
        """Called after `settle`: no byte of the answer reached the client after all."""
        usage, outcome = served.usage, served.outcome
        await durable(self._ledger.settle(self._hold, usage, outcome, delivered=False))

    async def give_back(self) -> None:
        """Called after `settle`: the server could not send the answer."""
        tenant, request_id = self._hold.tenant, self._hold.request_id
        name, why = f"failed:{request_id}", "the server could not send the answer"
        given = self._ledger.correct(tenant, request_id, reference=name, by=SYSTEM, reason=why)
        await durable(given)

    async def void(self) -> None:
        """Releases the hold. Does nothing after `settle`."""
        if self._ended:
            return
        self._ended = True
        await self._let_slice_end()
        await durable(self._ledger.void(self._hold))

    @property
    def _lease_is_old(self) -> bool:
        return time.monotonic() >= self._renew_at

    def _ask(self, progress: Callable[[], Usage]) -> None:
        """Requests the next slice, or only a renewal of the lease if all output is covered."""
        if self._asked is not None:
            return
        tokens = 0 if self.refusal else min(self._slice, self._most - self._covered)
        if not tokens and not self._lease_is_old:
            return
        amount = hold_amount(self._hold.pinned, prompt_tokens=0, output_tokens=tokens)
        self._renew_at = time.monotonic() + self._lease_s / RENEWALS_PER_LEASE
        self._asked_tokens = tokens
        self._asked = asyncio.wrap_future(
            self._ledger.top_up(self._hold, amount, usage=progress(), ttl_s=self._lease_s)
        )

    def _take_in(self) -> None:
        """Takes in an answered slice. Raises the ledger's errors, except refusals, and
        GenerationFailed if the hold has lapsed."""
        if self._asked is None or not self._asked.done():
            return
        asked, self._asked = self._asked, None
        try:
            asked.result()
            self._covered += self._asked_tokens
        except (InsufficientBalance, SpendLimitReached) as refusal:
            self.refusal = refusal
        except UnknownHold:
            raise GenerationFailed(LAPSED) from None

    async def _let_slice_end(self) -> None:
        """Awaits the pending slice, so that its result is read. The ledger takes commands in
        order."""
        if self._asked is not None:
            await asyncio.wait([self._asked])
            self._asked.exception()
            self._asked = None


def _terms(principal: Principal, job: Job, prompt_tokens: int) -> Terms:
    return Terms(
        tenant=principal.tenant, prompt_tokens=prompt_tokens, service=job.context.service_tier
    )


async def durable(future: "Future[Made]") -> Made:
    """The ledger's answer. Cancelling the waiter does not cancel the ledger's work."""
    if not future.done():  # else it needs no turn of the loop
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()

        def tell(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(answered.set)

        future.add_done_callback(tell)
        await answered.wait()
    return future.result()
