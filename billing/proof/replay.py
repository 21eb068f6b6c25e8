"""Walks a ledger's entries in order, checks each, and keeps their sums.

Used by `billing.proof.audit`, which names the invariants.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from billing.gate.entries import CORRECTING, Entry, Kind, digest, genesis, parse_postings
from billing.gate.holds import StoredHold
from billing.gate.rollups import Rollups
from billing.gate.work import TenantAccount
from billing.prices.book import PriceBook
from billing.proof.booked import Booked, Differs
from billing.proof.charges import ChargeChecks
from billing.proof.decisions import Decisions
from billing.proof.deposits import DEPOSITS, DepositChecks
from billing.proof.limits import LimitChecks
from billing.proof.result import UNREADABLE, Problem

KeptHeads = dict[str, dict[int, set[str]]]  # hashes by tenant and number, of several states


class ProofRun:
    """Walks entries in order and keeps their sums."""

    def __init__(
        self,
        book: PriceBook,
        corrections: dict[tuple[str, int], int],
        heads: KeptHeads,
        trail: Iterable[Mapping[Any, Any]],
        holds: Iterable[StoredHold],
    ) -> None:
        corrected = {(tenant, seq) for (tenant, _), seq in corrections.items()}
        self.limits = LimitChecks(trail, holds, corrected)
        self.accounts: dict[str, TenantAccount] = {}
        self.problems: dict[str, Problem] = {}
        self.rollups = Rollups()
        self.decisions = Decisions()
        self._corrections = corrections
        self._heads = heads
        self._charges = ChargeChecks(book, corrected)
        self._deposits = DepositChecks(corrected)

    def account(self, tenant: str, currency: str) -> TenantAccount:
        found = self.accounts.get(tenant)
        if found is None:
            found = TenantAccount(tenant, currency, None, False, genesis(tenant))
            self.accounts[tenant] = found
        return found

    def take(self, entry: Entry) -> None:
        """Checks an entry and adds it. Ignores the rest of a chain after a difference."""
        if entry.tenant in self.problems:
            return
        try:
            self._check(entry)
        except Differs as differs:
            self._report(entry, differs.invariant, str(differs))
        except UNREADABLE as error:
            self._report(entry, "readable", f"{type(error).__name__}: {error}")

    def _report(self, entry: Entry, invariant: str, message: str) -> None:
        self.problems[entry.tenant] = Problem(
            entry.tenant, entry.seq, invariant, message, entry.request_id
        )

    def _check(self, entry: Entry) -> None:
        account = self.account(entry.tenant, entry.currency)
        head = self._chained(entry, account)
        if entry.currency != account.currency:
            raise Differs("balanced", f"its currency is {entry.currency}, unlike the account's")
        booked = Booked(entry, account, parse_postings(entry.postings), entry.details)
        self._check_kind(booked)
        self._check_found_by(entry, booked.details)
        self.decisions.take(entry, booked.details)
        account.head, account.seq, account.at_ns = head, entry.seq, entry.at_ns
        account.take(entry)

    def _chained(self, entry: Entry, account: TenantAccount) -> bytes:
        """The entry's hash, after checking that it follows the previous entry and matches the given
        heads."""
        if entry.seq != account.seq + 1:
            raise Differs("gapless", f"it follows entry {account.seq}")
        if entry.at_ns < account.at_ns:
            raise Differs("gapless", "it is dated before the previous entry")
        head = digest(
            account.head,
            entry.tenant,
            entry.seq,
            entry.kind,
            entry.request_id,
            entry.at_ns,
            entry.currency,
            entry.postings,
            entry.body,
        )
        if head != entry.hash:
            raise Differs("chained", f"its hash is {entry.hash.hex()}, not {head.hex()}")
        others = self._heads.get(entry.tenant, {}).get(entry.seq, set()) - {head.hex()}
        if others:
            said = " and ".join(sorted(others))
            raise Differs("chained", f"its hash was {said} in a recorded head")
        return head

    def _check_kind(self, booked: Booked) -> None:
        entry = booked.entry
        if entry.kind == Kind.CHARGE:
            self._charges.check_charge(booked)
            self.limits.take_charge(booked)
            self.rollups.add(entry, booked.details)
        elif entry.kind == Kind.CORRECTION:
            self._charges.check_correction(booked)
            self.limits.take_correction(booked)
        elif entry.kind == Kind.ADJUSTMENT:
            self._deposits.check_adjustment(booked)
        elif entry.kind == Kind.EXPIRY:
            self._deposits.check_expiry(booked)
        elif entry.kind in DEPOSITS:
            self._deposits.check_deposit(booked)
        else:
            raise Differs("readable", f"{entry.kind!r} is not a kind of entry")

    def _check_found_by(self, entry: Entry, details: dict[str, Any]) -> None:
        """Checks that the indexed columns match the body."""
        copy = self._corrections.get((entry.tenant, entry.seq))
        if copy != (details["corrects"] if entry.kind in CORRECTING else None):
            raise Differs("corrected", f"its column `corrects` is {copy}, unlike its body")
        if entry.billed_ns != details.get("billed_ns"):
            raise Differs("billed", f"its column `billed_ns` is {entry.billed_ns}, unlike its body")
        if entry.kind != Kind.CHARGE and entry.moment_ns > entry.at_ns:
            raise Differs("billed", "it is billed after it was made")

    def expiring(self) -> set[tuple[str, int, str, int]]:
        """The grants that have yet to expire."""
        return self._deposits.expiring()
