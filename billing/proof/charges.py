"""Checks charges and their corrections: each is its usage times the card in force.

Used by `billing.proof.replay`, in the order of the entries.
"""

from collections.abc import Mapping
from typing import Any

from billing.gate.corrections import OWN_REFERENCES
from billing.gate.entries import TENANT_ACCOUNTS, Entry
from billing.gate.holds import rate_ref
from billing.gate.plans import (
    REFERENCE,
    charge_in,
    closing_ns,
    commitment_ref,
    committing_card,
    includes,
    month_ns,
    month_of,
)
from billing.gate.postings import refund, spend
from billing.gate.scoped import given_back, moved_by, taken_from
from billing.gate.work import SYSTEM, Used
from billing.money import format_units
from billing.prices.book import ABOVE, AND, PinnedRate, PriceBook, RateRef, Terms
from billing.prices.rating import Charge, rate
from billing.proof.booked import Booked, Differs, same
from billing.proof.history import CardHistory
from billing.usage import Usage


class ChargeChecks:
    """`corrected` are the entries, by tenant and number, that later entries correct."""

    def __init__(self, book: PriceBook, corrected: set[tuple[str, int]]) -> None:
        self._book = book
        self._history = CardHistory(book)
        self._corrected = corrected
        self._charges: dict[tuple[str, int], dict[str, int]] = {}  # the rest of corrected ones
        self._amounts: dict[tuple[str, int], int] = {}
        self._scoped: dict[tuple[str, int], dict[int, int]] = {}  # by the grant's number
        self._taken: dict[
            tuple[str, int], tuple[str, dict[str, int]]
        ] = {}  # month, included tokens
        self.used: dict[Used, int] = {}
        self._spent: dict[tuple[str, str], int] = {}  # by tenant and month
        self._unbound: dict[tuple[str, int], str] = {}  # the months of minimums that did not bind
        self._has_minimums = any(card.monthly_minimum for card in book.cards)
        self._rates: dict[RateRef, PinnedRate] = {}

    def check_charge(self, booked: Booked) -> None:
        entry, account, postings, details = booked
        pinned = self._pinned(rate_ref(details))
        month = month_of(entry.moment_ns)
        if "commitment" in details:
            charge = self._check_commitment(booked, pinned)
        else:
            left = includes(pinned, month, self.used, entry.tenant)
            charge = rate(Usage.from_record(details.get("usage", {})), pinned, left)
        self._check_included(details, charge)
        if pinned.currency != entry.currency:
            raise Differs("rated", f"its card is in {pinned.currency}, unlike the account")
        scoped = taken_from(account.grants, pinned.ref, charge.amount)
        _check_scoped("rated", details, scoped, -1)
        same("rated", postings, spend(account, charge.amount, sum(scoped.values())))
        if int(details["saved"]) != charge.saved:
            raise Differs("rated", f"it saved {charge.saved} units, not {details['saved']}")
        if int(details.get("fees", 0)) != charge.fees:
            raise Differs("rated", f"its fees should be {charge.fees} units")
        admitted_ns = details.get("admitted_ns", 0)
        if entry.billed_ns not in (None, admitted_ns):
            raise Differs("billed", "it is not billed at its admission")
        if admitted_ns:
            self._check_card(entry, pinned.ref, admitted_ns)
        if admitted_ns and "commitment" not in details:
            self._check_terms(entry, details, pinned.ref, admitted_ns)
        key = (entry.tenant, entry.seq)
        self._use(entry.tenant, month, pinned.ref.card, charge.taken)
        if self._has_minimums:
            sums = (entry.tenant, month)
            self._spent[sums] = self._spent.get(sums, 0) + charge.amount
        if key in self._corrected:
            self._taken[key] = month, dict(charge.taken)
            self._charges[key] = {name: -postings.get(name, 0) for name in TENANT_ACCOUNTS}
            self._amounts[key] = charge.amount
            self._scoped[key] = scoped

    def check_correction(self, booked: Booked) -> None:
        entry, account, postings, details = booked
        key = (entry.tenant, details["corrects"])
        taken = self._charges.get(key)
        if taken is None:
            raise Differs("corrected", f"it corrects {details['corrects']}, not an earlier charge")
        amount = postings.get("revenue", 0)
        if "usage" in details or "card" in details:
            usage = Usage.from_record(details.get("usage", {}))
            pinned = self._pinned(rate_ref(details))
            month, took = self._taken[key]
            left = includes(pinned, month, self.used, entry.tenant)
            left = {name: tokens + took.get(name, 0) for name, tokens in left.items()}
            charge = rate(usage, pinned, left)
            self._check_included(details, charge)
            more = {n: charge.taken.get(n, 0) - took.get(n, 0) for n in {*took, *charge.taken}}
            self._use(entry.tenant, month, pinned.ref.card, more)
            self._taken[key] = month, dict(charge.taken)
            if amount != charge.amount - self._amounts[key]:
                raise Differs("corrected", "it is not the difference of the two usages")
        elif details.get("by") == SYSTEM:
            own = entry.request_id.startswith(OWN_REFERENCES)
            if not own or -amount != sum(taken.values()):
                raise Differs("corrected", "the server refunds only whole charges")
        if amount < 0 and -amount > sum(taken.values()):
            raise Differs("corrected", f"it refunds more than the {sum(taken.values())} left")
        if amount > 0:
            ref = self._pinned(rate_ref(details)).ref
            scoped, sign = taken_from(account.grants, ref, amount), -1
            due = spend(account, amount, sum(scoped.values()))
        else:
            due, sign = refund(account, taken, -amount), 1
            scoped = given_back(account.grants, self._scoped[key], due["scoped"])
        _check_scoped("corrected", details, scoped, sign)
        same("corrected", postings, due)
        for seq, units in scoped.items():
            self._scoped[key][seq] = self._scoped[key].get(seq, 0) - sign * units
        for name in TENANT_ACCOUNTS:
            taken[name] -= postings.get(name, 0)

    def unbound(self) -> dict[tuple[str, int], str]:
        """The months of the minimums that bound nobody and were not given back in full."""
        return {
            key: month
            for key, month in self._unbound.items()
            if key not in self._charges or sum(self._charges[key].values()) != 0
        }

    def _check_commitment(self, booked: Booked, pinned: PinnedRate) -> Charge:
        """Checks a month's minimum: the card has one, the month was over, and the amount is the
        shortfall.

        An earlier version booked minimums of months in which the card was not yet applied or the
        tenant did not yet exist. `unbound` names these.
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
        return charge_in(details, pinned)

    def _check_included(self, details: dict[str, Any], charge: Charge) -> None:
        said = details.get("included", {}), int(details.get("included_amount", 0))
        if said != (charge.taken, charge.included):
            raise Differs("rated", f"its included tokens should be {dict(charge.taken)}")

    def _use(self, tenant: str, month: str, card: str, more: Mapping[str, int]) -> None:
        for item, tokens in more.items():
            key = (tenant, month, card, item)
            self.used[key] = self.used.get(key, 0) + tokens

    def _check_terms(
        self, entry: Entry, details: dict[str, Any], ref: RateRef, admitted_ns: int
    ) -> None:
        """Checks that window, group and length are the request's. A service tier is as
        requested."""
        card = self._book.card(ref.card, ref.version)
        first, *factors = ref.window.split(AND)
        service = next((name for name in factors if name in card.services), "")
        named = int(first.removeprefix(ABOVE)) if first.startswith(ABOVE) else 0
        usage = Usage.from_record(details.get("usage", {}))
        if usage.prompt and details["outcome"] == "finished" and usage.prompt <= named:
            raise Differs("rated", f"its prompt of {usage.prompt} tokens is not above {named}")
        terms = Terms(tenant=entry.tenant, prompt_tokens=named + 1 if named else 0, service=service)
        window = card.window_for(ref.model, admitted_ns, terms)
        if window != ref.window:
            raise Differs("rated", f"it was admitted in window {window!r}, not {ref.window!r}")

    def _check_card(self, entry: Entry, ref: RateRef, admitted_ns: int) -> None:
        """Checks that the card was in force, and known, at the admission."""
        seen = self._history.at(ref.model, admitted_ns, entry.currency, entry.tenant)
        if (ref.card, ref.version) not in seen:
            named = " or ".join(f"{name} {version}" for name, version in sorted(seen)) or "none"
            raise Differs(
                "rated",
                f"it is rated by card {ref.card} {ref.version}, but {named} was in force when it "
                "was admitted",
            )

    def _pinned(self, ref: RateRef) -> PinnedRate:
        found = self._rates.get(ref)
        if found is None:
            found = self._rates[ref] = self._book.pinned(ref)
        return found


def _check_scoped(
    invariant: str, details: dict[str, Any], scoped: Mapping[int, int], sign: int
) -> None:
    expected = {seq: sign * units for seq, units in scoped.items() if units}
    if moved_by(details) != expected:
        raise Differs(invariant, f"it should move {expected} of scoped grants, by number")
