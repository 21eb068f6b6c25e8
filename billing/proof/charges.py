"""Checks charges and their corrections: each is its usage times the card in force.

Used by `billing.proof.replay`, in the order of the entries.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from billing.gate.corrections import OWN_REFERENCES
from billing.gate.entries import TENANT_ACCOUNTS, Entry
from billing.gate.holds import rate_ref
from billing.gate.plans import includes, month_of
from billing.gate.postings import refund, spend
from billing.gate.scoped import given_back, moved_by, taken_from
from billing.gate.work import SYSTEM, Used
from billing.prices.book import ABOVE, AND, PinnedRate, PriceBook, RateRef, Terms
from billing.prices.rating import Charge, rate
from billing.proof.booked import Booked, Differs, same
from billing.proof.history import CardHistory
from billing.proof.minimums import MinimumChecks
from billing.proof.result import Problem
from billing.usage import Usage


@dataclass(slots=True)
class _Corrected:
    """A charge that later entries correct. `left` is what it still takes from each account."""

    request_id: str
    fingerprint: str
    is_retry: bool
    month: str
    amount: int
    included: dict[str, int]  # tokens by item
    left: dict[str, int]
    scoped: dict[int, int]  # by the grant's number


class ChargeChecks:
    """`corrected` are the entries, by tenant and number, that later entries correct."""

    def __init__(self, book: PriceBook, corrected: set[tuple[str, int]]) -> None:
        self._book = book
        self._history = CardHistory(book)
        self._minimums = MinimumChecks(book)
        self._corrected = corrected
        self._charges: dict[tuple[str, int], _Corrected] = {}
        self._retried: set[tuple[str, str]] = set()  # tenants and fingerprints of charged retries
        self._after_retry: set[str] = set()  # tenants whose last settled request is a retry
        self.used: dict[Used, int] = {}
        self._rates: dict[RateRef, PinnedRate] = {}

    def check_charge(self, booked: Booked) -> None:
        entry, account, postings, details = booked
        pinned = self._pinned(rate_ref(details))
        month = month_of(entry.moment_ns)
        if "commitment" in details:
            charge = self._minimums.check(booked, pinned)
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
        self._minimums.add(booked, month, charge.amount)
        fingerprint, is_retry = details.get("fingerprint", ""), details.get("retry", False)
        self._settled(entry.tenant, fingerprint, is_retry)
        if key in self._corrected:
            self._charges[key] = _Corrected(
                entry.request_id,
                fingerprint,
                is_retry,
                month,
                charge.amount,
                dict(charge.taken),
                {name: -postings.get(name, 0) for name in TENANT_ACCOUNTS},
                scoped,
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
        if amount > 0:
            ref = self._pinned(rate_ref(details)).ref
            scoped, sign = taken_from(account.grants, ref, amount), -1
            due = spend(account, amount, sum(scoped.values()))
        else:
            due, sign = refund(account, charged.left, -amount), 1
            scoped = given_back(account.grants, charged.scoped, due["scoped"])
        _check_scoped("corrected", details, scoped, sign)
        same("corrected", postings, due)
        for seq, units in scoped.items():
            charged.scoped[seq] = charged.scoped.get(seq, 0) - sign * units
        for name in TENANT_ACCOUNTS:
            charged.left[name] -= postings.get(name, 0)

    def _check_late(self, booked: Booked, charged: _Corrected, amount: int) -> None:
        """Checks the difference to what the server settled itself, later."""
        entry, details = booked.entry, booked.details
        if entry.request_id != f"late:{charged.request_id}":
            raise Differs("corrected", f"it does not settle {charged.request_id!r} again")
        pinned, took = self._pinned(rate_ref(details)), charged.included
        left = includes(pinned, charged.month, self.used, entry.tenant)
        left = {name: tokens + took.get(name, 0) for name, tokens in left.items()}
        charge = rate(Usage.from_record(details.get("usage", {})), pinned, left)
        self._check_included(details, charge)
        more = {n: charge.taken.get(n, 0) - took.get(n, 0) for n in {*took, *charge.taken}}
        self._use(entry.tenant, charged.month, pinned.ref.card, more)
        charged.included = dict(charge.taken)
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

    def minimums(self) -> Iterator[Problem]:
        """What is wrong with minimums, beyond one entry."""
        refunded = {k for k, charged in self._charges.items() if not sum(charged.left.values())}
        yield from self._minimums.problems(refunded)

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
