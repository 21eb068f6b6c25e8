"""Checks charges and their corrections: each is its usage times the card in force.

Used by `billing.proof.replay`, in the order of the entries.
"""

from dataclasses import dataclass
from typing import Any

from billing.gate.corrections import OWN_REFERENCES
from billing.gate.entries import TENANT_ACCOUNTS, Entry
from billing.gate.holds import rate_ref
from billing.gate.postings import refund, spend
from billing.gate.work import SYSTEM
from billing.prices.book import ABOVE, PinnedRate, PriceBook, RateRef, Terms
from billing.prices.rating import charge_in
from billing.proof.booked import Booked, Differs, same
from billing.proof.history import CardHistory
from billing.usage import Usage


@dataclass(slots=True)
class _Corrected:
    """A charge that later entries correct. `left` is what it still takes from each account."""

    request_id: str
    fingerprint: str
    is_retry: bool
    amount: int
    left: dict[str, int]


class ChargeChecks:
    """`corrected` are the entries, by tenant and number, that later entries correct."""

    def __init__(self, book: PriceBook, corrected: set[tuple[str, int]]) -> None:
        self._book = book
        self._history = CardHistory(book)
        self._corrected = corrected
        self._charges: dict[tuple[str, int], _Corrected] = {}
        self._retried: set[tuple[str, str]] = set()  # tenants and fingerprints of charged retries
        self._after_retry: set[str] = set()  # tenants whose last settled request is a retry
        self._rates: dict[RateRef, PinnedRate] = {}

    def check_charge(self, booked: Booked) -> None:
        entry, account, postings, details = booked
        pinned = self._pinned(rate_ref(details))
        charge = charge_in(details, pinned)
        if pinned.currency != entry.currency:
            raise Differs("rated", f"its card is in {pinned.currency}, unlike the account")
        same("rated", postings, spend(account, charge.amount))
        if int(details["saved"]) != charge.saved:
            raise Differs("rated", f"it saved {charge.saved} units, not {details['saved']}")
        if int(details.get("fees", 0)) != charge.fees:
            raise Differs("rated", f"its fees should be {charge.fees} units")
        admitted_ns = details.get("admitted_ns", 0)
        if entry.billed_ns not in (None, admitted_ns):
            raise Differs("billed", "it is not billed at its admission")
        if admitted_ns:
            self._check_card(entry, pinned.ref, admitted_ns)
            self._check_terms(entry, details, pinned.ref, admitted_ns)
        key = (entry.tenant, entry.seq)
        fingerprint, is_retry = details.get("fingerprint", ""), details.get("retry", False)
        self._settled(entry.tenant, fingerprint, is_retry)
        if key in self._corrected:
            self._charges[key] = _Corrected(
                entry.request_id,
                fingerprint,
                is_retry,
                charge.amount,
                {name: -postings.get(name, 0) for name in TENANT_ACCOUNTS},
            )

    def _settled(self, tenant: str, fingerprint: str, is_retry: bool) -> None:
        if is_retry:
            self._retried.add((tenant, fingerprint))
            self._after_retry.add(tenant)
        else:
            self._after_retry.discard(tenant)

    def check_correction(self, booked: Booked) -> None:
        entry, account, postings, details = booked
        key = (entry.tenant, details["corrects"])
        charged = self._charges.get(key)
        if charged is None:
            raise Differs("corrected", f"it corrects {details['corrects']}, not an earlier charge")
        amount, rest = postings.get("revenue", 0), sum(charged.left.values())
        if "usage" in details or "card" in details:
            self._check_late(booked, charged, amount)
        elif details.get("by") == SYSTEM:
            self._check_own(entry, charged)
            if -amount != rest:
                raise Differs("corrected", "the server refunds only whole charges")
        if amount < 0 and -amount > rest:
            raise Differs("corrected", f"it refunds more than the {rest} left")
        due = spend(account, amount) if amount > 0 else refund(account, charged.left, -amount)
        same("corrected", postings, due)
        for name in TENANT_ACCOUNTS:
            charged.left[name] -= postings.get(name, 0)

    def _check_late(self, booked: Booked, charged: _Corrected, amount: int) -> None:
        """Checks the difference to what the server settled itself, later."""
        entry, details = booked.entry, booked.details
        if entry.request_id != f"late:{charged.request_id}":
            raise Differs("corrected", f"it does not settle {charged.request_id!r} again")
        charge = charge_in(details, self._pinned(rate_ref(details)))
        if amount != charge.amount - charged.amount:
            raise Differs("corrected", "it is not the difference of the two usages")
        self._settled(entry.tenant, charged.fingerprint, charged.is_retry)

    def _check_own(self, entry: Entry, charged: _Corrected) -> None:
        """Checks that the server may have given this charge back: it names the charge, and a retry
        was charged instead."""
        if entry.request_id not in {f"{own}{charged.request_id}" for own in OWN_REFERENCES}:
            raise Differs("corrected", f"the server gives back {charged.request_id!r} by its id")
        is_paid = (entry.tenant, charged.fingerprint) in self._retried
        is_paid |= entry.tenant in self._after_retry  # of another key, under one Idempotency-Key
        if entry.request_id.startswith("retry:") and not is_paid:
            raise Differs("corrected", f"no retry of {charged.request_id!r} was charged before it")

    def _check_terms(
        self, entry: Entry, details: dict[str, Any], ref: RateRef, admitted_ns: int
    ) -> None:
        """Checks that window, group and length are the request's. A service tier is as
        requested."""
        card = self._book.card(ref.card, ref.version)
        first, *factors = ref.terms
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
