"""Checks charges and their corrections: each is its usage times the card that was in force.

Used by `billing.proof.replay`, in the order of the entries.
"""

from typing import Any

from billing.gate.corrections import OWN_REFERENCES
from billing.gate.entries import TENANT_ACCOUNTS, Entry
from billing.gate.holds import rate_ref
from billing.gate.postings import refund, spend
from billing.gate.work import SYSTEM
from billing.prices.book import ABOVE, AND, PinnedRate, PriceBook, RateRef, Terms
from billing.prices.rating import rate
from billing.proof.booked import Booked, Differs, same
from billing.proof.history import CardHistory
from billing.usage import Usage


class ChargeChecks:
    """`corrected` names the entries, by tenant and number, that a later entry corrects."""

    def __init__(
        self, book: PriceBook, history: CardHistory, corrected: set[tuple[str, int]]
    ) -> None:
        self._book = book
        self._history = history
        self._corrected = corrected
        self._charges: dict[tuple[str, int], dict[str, int]] = {}  # what is left of corrected ones
        self._amounts: dict[tuple[str, int], int] = {}
        self._rates: dict[RateRef, PinnedRate] = {}

    def check_charge(self, booked: Booked) -> None:
        entry, account, postings, details = (
            booked.entry,
            booked.account,
            booked.postings,
            booked.details,
        )
        pinned = self._pinned(rate_ref(details))
        charge = rate(Usage.from_record(details.get("usage", {})), pinned)
        if pinned.currency != entry.currency:
            raise Differs("rated", f"its card is in {pinned.currency}")
        same("rated", postings, spend(account, charge.amount))
        if int(details["saved"]) != charge.saved:
            raise Differs("rated", f"it saved {charge.saved} units, not {details['saved']}")
        if int(details.get("fees", 0)) != charge.fees:
            raise Differs("rated", f"its fees are {charge.fees} units")
        admitted_ns = details.get("admitted_ns", 0)
        if entry.billed_ns not in (None, admitted_ns):
            raise Differs("billed", "it is not billed by its admission")
        if admitted_ns:
            self._check_card(entry, pinned.ref, admitted_ns)
            self._check_terms(entry, details, pinned.ref, admitted_ns)
        key = (entry.tenant, entry.seq)
        if key in self._corrected:
            self._charges[key] = {name: -postings.get(name, 0) for name in TENANT_ACCOUNTS}
            self._amounts[key] = charge.amount

    def check_correction(self, booked: Booked) -> None:
        entry, account, postings, details = (
            booked.entry,
            booked.account,
            booked.postings,
            booked.details,
        )
        key = (entry.tenant, details["corrects"])
        taken = self._charges.get(key)
        if taken is None:
            raise Differs("corrected", f"entry {details['corrects']} is no charge before it")
        amount = postings.get("revenue", 0)
        if "usage" in details or "card" in details:
            usage = Usage.from_record(details.get("usage", {}))
            charge = rate(usage, self._pinned(rate_ref(details)))
            if amount != charge.amount - self._amounts[key]:
                raise Differs("corrected", "it is not the difference of the two usages")
        elif details.get("by") == SYSTEM:
            own = entry.request_id.startswith(OWN_REFERENCES)
            if not own or -amount != sum(taken.values()):
                raise Differs("corrected", "the server gives back a charge whole, or not at all")
        if amount < 0 and -amount > sum(taken.values()):
            raise Differs("corrected", f"it gives back more than the {sum(taken.values())} left")
        due = spend(account, amount) if amount > 0 else refund(account, taken, -amount)
        same("corrected", postings, due)
        for name in TENANT_ACCOUNTS:
            taken[name] -= postings.get(name, 0)

    def _check_terms(
        self, entry: Entry, details: dict[str, Any], ref: RateRef, admitted_ns: int
    ) -> None:
        """Window, group and length are the request's; a service tier is what it asked for."""
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
        """The card is the one that was in force, and known, at the admission."""
        seen = self._history.at(ref.model, admitted_ns, entry.currency, entry.tenant)
        if (ref.card, ref.version) not in seen:
            named = " or ".join(f"{name} {version}" for name, version in sorted(seen)) or "none"
            raise Differs(
                "rated",
                f"it is rated by card {ref.card} {ref.version}, and {named} was in force when it "
                "was admitted",
            )

    def _pinned(self, ref: RateRef) -> PinnedRate:
        found = self._rates.get(ref)
        if found is None:
            found = self._rates[ref] = self._book.pinned(ref)
        return found
