"""Checks the monthly minimums: those that are booked, and that none is missing.

Used by `billing.proof.charges`, in the order of the entries.
"""

from collections.abc import Collection, Iterator

from billing.gate.plans import (
    GRACE_NS,
    REFERENCE,
    charge_in,
    closing_ns,
    commitment_ref,
    committing_card,
    month_ns,
    month_of,
)
from billing.gate.work import TenantAccount
from billing.money import format_units
from billing.prices.book import PinnedRate, PriceBook
from billing.prices.rating import Charge
from billing.proof.booked import Booked, Differs
from billing.proof.history import LAG_NS
from billing.proof.result import Problem

_Month = tuple[str, str]  # tenant and month


class MinimumChecks:
    """Sums the charges of tenants whose card has a minimum, by month."""

    def __init__(self, book: PriceBook) -> None:
        self._book = book
        self._tenants = {t for card in book.cards if card.monthly_minimum for t in card.tenants}
        self._spent: dict[_Month, int] = {}
        self._unbound: dict[tuple[str, int], str] = {}  # months, by tenant and number
        self._closed: set[_Month] = set()
        self._served: dict[_Month, int] = {}  # the first request after a month was to be closed
        self._missing: set[_Month] = set()

    def check(self, booked: Booked, pinned: PinnedRate) -> Charge:
        """The charge of a minimum: its card has one, the month was over, and the amount is the
        shortfall.

        An earlier version booked minimums of months in which the card was not yet applied or the
        tenant did not yet exist. `problems` names these.
        """
        entry, account, _, details = booked
        month = details["commitment"]
        card = committing_card(self._book, account, month)
        if card is None:
            card = self._book.card(pinned.ref.card, pinned.ref.version)
            if int(details.get("fees", 0)):
                self._unbound[entry.tenant, entry.seq] = month
        if pinned.ref != commitment_ref(card) or entry.tenant not in card.tenants:
            raise Differs("rated", f"card {pinned.ref.card} has no minimum for {month}")
        dated = (entry.request_id, entry.moment_ns) == (REFERENCE + month, closing_ns(month))
        if not dated or entry.at_ns < month_ns(month)[1] or details.get("usage"):
            raise Differs("rated", f"it is not the minimum of {month}")
        missing = max(0, card.monthly_minimum - self._spent.get((entry.tenant, month), 0))
        if int(details.get("fees", 0)) != missing:
            said = format_units(missing)
            raise Differs("rated", f"the charges of {month} are {said} short of the minimum")
        self._closed.add((entry.tenant, month))
        return charge_in(details, pinned)

    def add(self, booked: Booked, month: str, amount: int) -> None:
        """Adds a charge of a month."""
        entry, account, _, details = booked
        if entry.tenant not in self._tenants:
            return
        self._spent[entry.tenant, month] = self._spent.get((entry.tenant, month), 0) + amount
        usage = details.get("usage", {})
        if "miss" in usage and "admitted_ns" in details:  # a request: the server ran
            self._serve(account, month_of(month_ns(month)[0] - 1), details["admitted_ns"])

    def _serve(self, account: TenantAccount, month: str, admitted_ns: int) -> None:
        """Notes a missing minimum if a server admitted requests for ten minutes after a month was
        to be closed. A server that was down for long may have missed it."""
        key = (account.tenant, month)
        if key in self._missing or admitted_ns < month_ns(month)[1] + GRACE_NS:
            return
        first_ns = self._served.setdefault(key, admitted_ns)
        if admitted_ns - first_ns >= LAG_NS:
            card = committing_card(self._book, account, month)
            # Earlier versions let a card that was applied later take the place of this one.
            latest = self._book.in_force(closing_ns(month), account.currency, account.tenant)
            if card is not None and card is latest:
                self._missing.add(key)

    def problems(self, refunded: Collection[tuple[str, int]]) -> Iterator[Problem]:
        """Minimums that bound nobody, unless they are refunded, and minimums that are missing."""
        for (tenant, seq), month in self._unbound.items():
            name = REFERENCE + month
            if (tenant, seq) not in refunded:
                message = (
                    f"no card's minimum bound {tenant!r} in all of {month}; give it back: "
                    f"`cachesvc ledger correct {tenant} {name} --reason WHY`"
                )
                yield Problem(tenant, seq, "rated", message, name)
        for tenant, month in sorted(self._missing - self._closed):
            message = f"its minimum of {month} is missing, though requests were served since"
            yield Problem(f"tenant {tenant!r}", 0, "rated", message)
