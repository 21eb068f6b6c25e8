"""Checks the entries that bring or take money: deposits, their adjustments and expired grants.

Used by `billing.proof.replay`, in the order of the entries.
"""

from billing.gate.deposits import INCOMING
from billing.gate.entries import Kind
from billing.gate.grants import Grant, expires_ns_of, remaining
from billing.gate.postings import deposited
from billing.gate.work import NEVER
from billing.money import format_units
from billing.proof.booked import Booked, Differs, same

DEPOSITS = (*INCOMING, Kind.WITHDRAWAL, Kind.CHARGEBACK)


class DepositChecks:
    """`corrected` are the entries, by tenant and number, that later entries correct."""

    def __init__(self, corrected: set[tuple[str, int]]) -> None:
        self._corrected = corrected
        self._deposits: dict[tuple[str, int], tuple[Kind, int]] = {}  # of corrected ones
        self._grants: dict[str, dict[int, Grant]] = {}  # by tenant and number

    def check_deposit(self, booked: Booked) -> None:
        entry, account, postings, _ = booked
        gains = entry.kind in INCOMING
        if gains != (entry.amount > 0):
            raise Differs("balanced", f"a {entry.kind} cannot be {format_units(entry.amount)}")
        if entry.kind == Kind.WITHDRAWAL and account.balances["topup"] + entry.amount < 0:
            raise Differs("balanced", "it pays out more paid money than is left")
        same("balanced", postings, deposited(account, Kind(entry.kind), entry.amount))
        if entry.kind == Kind.GRANT:
            expires_ns = expires_ns_of(entry)
            grant = Grant(entry.seq, entry.request_id, entry.amount, expires_ns)
            self._grants.setdefault(entry.tenant, {})[entry.seq] = grant
        elif "expires_ns" in entry.details:
            raise Differs("balanced", f"a {entry.kind} does not expire")
        if (entry.tenant, entry.seq) in self._corrected:
            self._deposits[entry.tenant, entry.seq] = Kind(entry.kind), entry.amount

    def check_adjustment(self, booked: Booked) -> None:
        entry, account, postings, details = booked
        key = (entry.tenant, details["corrects"])
        kind, stands = self._deposits.get(key, (None, 0))
        if kind not in INCOMING:
            raise Differs("corrected", f"it corrects {details['corrects']}, not an earlier deposit")
        if stands + entry.amount < 0:
            raise Differs("corrected", "it reduces a deposit below zero")
        same("corrected", postings, deposited(account, kind, entry.amount))
        self._deposits[key] = kind, stands + entry.amount
        if kind is Kind.GRANT:
            self._grants[entry.tenant][details["corrects"]].amount += entry.amount

    def check_expiry(self, booked: Booked) -> None:
        entry, account, postings, details = booked
        grants = self._grants.get(entry.tenant, {})
        grant = grants.get(details["corrects"])
        if grant is None or grant.is_over:
            raise Differs("corrected", f"it ends {details['corrects']}, which is not an open grant")
        if entry.request_id != grant.reference or entry.at_ns < grant.expires_ns:
            raise Differs("corrected", f"grant {grant.reference!r} had not expired")
        left = remaining(grants.values(), account.balances["granted"])[grant.seq]
        same("corrected", postings, {"granted": -left, "promotion": left})
        grant.is_over = True

    def expiring(self) -> set[tuple[str, int, str, int]]:
        """The grants that have yet to expire."""
        return {
            (tenant, grant.seq, grant.reference, grant.expires_ns)
            for tenant, grants in self._grants.items()
            for grant in grants.values()
            if grant.expires_ns != NEVER and not grant.is_over
        }
