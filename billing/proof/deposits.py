"""Checks the entries that bring or take money: deposits, their adjustments and expired grants.

Used by `billing.proof.replay`, in the order of the entries.
"""

from billing.gate.deposits import INCOMING
from billing.gate.entries import Kind
from billing.gate.grants import Grant, expires_ns_of, remaining
from billing.gate.postings import deposited, pay_in
from billing.gate.scoped import ScopedGrant, moved_by, scope_of
from billing.gate.wallets import check_rate, converted
from billing.gate.work import NEVER
from billing.money import format_units
from billing.proof.booked import Booked, Differs, same

RATE = ("rate", "rate_date", "rate_source")
DEPOSITS = (*INCOMING, Kind.WITHDRAWAL, Kind.CHARGEBACK)


class DepositChecks:
    """`corrected` are the entries, by tenant and number, that later entries correct."""

    def __init__(self, corrected: set[tuple[str, int]]) -> None:
        self._corrected = corrected
        self._deposits: dict[tuple[str, int], tuple[Kind, int]] = {}  # of corrected ones
        self._grants: dict[str, dict[int, Grant]] = {}  # by tenant and number
        self.wallets: dict[tuple[str, str], int] = {}  # by tenant and currency

    def check_deposit(self, booked: Booked) -> None:
        entry, account, postings, _ = booked
        gains = entry.kind in INCOMING
        if gains != (entry.amount > 0):
            raise Differs("balanced", f"a {entry.kind} cannot be {format_units(entry.amount)}")
        if entry.kind == Kind.WITHDRAWAL and account.balances["topup"] + entry.amount < 0:
            raise Differs("balanced", "it pays out more paid money than is left")
        scope, scoped = scope_of(entry.details), None
        if scope:
            scoped = ScopedGrant(entry.seq, entry.request_id, scope, NEVER)
        if (scope and entry.kind != Kind.GRANT) or moved_by(entry.details):
            raise Differs("balanced", f"a {entry.kind} has no scope")
        same("balanced", postings, deposited(account, Kind(entry.kind), entry.amount, scoped))
        if entry.kind == Kind.GRANT:
            expires_ns = expires_ns_of(entry)
            grant = Grant(entry.seq, entry.request_id, entry.amount, expires_ns, bool(scope))
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
        scoped = account.grants.get(details["corrects"])
        same("corrected", postings, deposited(account, kind, entry.amount, scoped))
        _check_moves(booked, details["corrects"])
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
        if grant.is_scoped:
            left, source = account.grants[grant.seq].left, "scoped"
        else:
            free = [each for each in grants.values() if not each.is_scoped]
            left = remaining(free, account.balances["granted"])[grant.seq]
            source = "granted"
        same("corrected", postings, {source: -left, "promotion": left})
        _check_moves(booked, grant.seq)
        grant.is_over = True

    def check_wallet(self, booked: Booked) -> None:
        """Checks that a wallet never goes below zero and a conversion is its amount times its
        rate."""
        entry, account, _, details = booked
        key, moves = (entry.tenant, details["wallet"]), int(details["moves"])
        left = self.wallets.get(key, 0) + moves
        if left < 0 or details["wallet"] == account.currency:
            raise Differs("balanced", f"its wallet in {details['wallet']} has less than that")
        expected: dict[str, int] = {}
        if entry.kind == Kind.CONVERSION:
            gain = converted(-moves, check_rate(*(details[name] for name in RATE)))
            expected = {**pay_in(account, gain), "cash": -gain}
        elif any(name in details for name in RATE):
            raise Differs("balanced", "it has a rate but converts nothing")
        if moves == 0 or (entry.kind == Kind.CONVERSION and moves > 0):
            raise Differs("balanced", f"a {entry.kind} cannot move {moves} units")
        same("balanced", booked.postings, expected)
        self.wallets[key] = left

    def expiring(self) -> set[tuple[str, int, str, int]]:
        """The grants that have yet to expire."""
        return {
            (tenant, grant.seq, grant.reference, grant.expires_ns)
            for tenant, grants in self._grants.items()
            for grant in grants.values()
            if grant.expires_ns != NEVER and not grant.is_over
        }


def _check_moves(booked: Booked, seq: int) -> None:
    """Checks that an entry moves only the scoped grant it names."""
    units = booked.postings.get("scoped", 0)
    if moved_by(booked.details) != ({seq: units} if units else {}):
        raise Differs("corrected", f"it moves {units} units of grant {seq}, unlike its body")
