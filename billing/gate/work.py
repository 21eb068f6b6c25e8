"""The data of one ledger transaction in memory: accounts, holds and entries. Pure.

`billing.store` fills it, `billing.gate.gate` applies commands, and the store writes the changes.
"""

from dataclasses import dataclass, field
from typing import Any

import orjson

from billing.errors import InsufficientBalance, SpendLimitReached, UnknownTenant
from billing.gate.commands import Key
from billing.gate.entries import (
    ACCOUNTS,
    TENANT_ACCOUNTS,
    Entry,
    Kind,
    Postings,
    canonical,
    digest,
    format_postings,
)
from billing.gate.holds import StoredHold
from billing.gate.limits import NOTHING, Checked, Spender, Spending, SpendLimit, reached
from billing.money import format_units
from billing.prices.book import PriceBook
from billing.prices.rating import Charge
from billing.usage import Usage

SYSTEM = "system"  # the actor of entries that no person decided
NEVER = 2**63 - 1  # the expiry of a grant without one


@dataclass(slots=True)
class TenantAccount:
    """A tenant's projection: the sums of its entries and holds, and the end of its chain."""

    tenant: str
    currency: str
    credit_limit: int | None  # how far below zero it may go: 0 is prepaid, None is unlimited
    suspended: bool
    head: bytes
    seq: int = 0
    at_ns: int = 0
    held: int = 0
    balances: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ACCOUNTS, 0))
    limited: bool = False  # whether it has hard limits

    @property
    def worth(self) -> int:
        return sum(self.balances[name] for name in TENANT_ACCOUNTS)

    @property
    def available(self) -> int | None:
        """The money available to a hold; None is unlimited."""
        return None if self.credit_limit is None else self.worth + self.credit_limit - self.held

    def take(self, entry: Entry) -> None:
        """Applies an entry to the balances."""
        for name, units in entry.amounts.items():
            self.balances[name] += units


@dataclass(frozen=True, slots=True)
class Settled:
    """A request's current charge. `repeated` if it had been settled before."""

    entry: Entry
    charge: Charge
    usage: Usage
    repeated: bool = False


@dataclass(slots=True)
class Work:
    """The rows that one transaction read, and those it will write. Only `apply` changes it."""

    book: PriceBook
    now_ns: int
    accounts: dict[str, TenantAccount]
    holds: dict[Key, StoredHold] = field(default_factory=dict)
    entries: dict[Key, list[Entry]] = field(default_factory=dict)
    undelivered: dict[Key, list[Entry]] = field(default_factory=dict)  # by fingerprint
    corrections: dict[tuple[str, int], list[Entry]] = field(
        default_factory=dict
    )  # by corrected seq
    grants: dict[str, list[Entry]] = field(default_factory=dict)  # of tenants where one may expire
    limits: dict[str, list[SpendLimit]] = field(default_factory=dict)  # by tenant
    spending: dict[Spender, Spending] = field(default_factory=dict)
    put_spending: set[Spender] = field(default_factory=set)
    new_entries: list[Entry] = field(default_factory=list)
    put_holds: dict[Key, StoredHold] = field(default_factory=dict)
    dropped_holds: set[Key] = field(default_factory=set)
    decisions: list[tuple[Entry, int]] = field(default_factory=list)  # an admin's, and worth before
    touched: set[str] = field(default_factory=set)  # tenants whose account row has changed
    put_undelivered: set[tuple[Key, str]] = field(default_factory=set)  # fingerprint, request id
    dropped_undelivered: set[Key] = field(default_factory=set)

    def account(self, tenant: str) -> TenantAccount:
        try:
            return self.accounts[tenant]
        except KeyError:
            raise UnknownTenant(
                f"tenant {tenant!r} does not exist; create it with "
                f"`cachesvc tenants create {tenant}`"
            ) from None

    def entry(self, tenant: str, request_id: str, kind: Kind) -> Entry | None:
        found = self.entries.get((tenant, request_id), ())
        return next((entry for entry in found if entry.kind is kind), None)

    def put_hold(self, hold: StoredHold) -> None:
        before = self.holds.get(hold.key)
        more = hold.amount - (before.amount if before else 0)
        self.accounts[hold.tenant].held += more
        self._count_held(hold, more)
        self.holds[hold.key] = self.put_holds[hold.key] = hold
        self.dropped_holds.discard(hold.key)
        self.touched.add(hold.tenant)

    def drop_hold(self, key: Key) -> StoredHold | None:
        """Ends a hold, if it stands, and returns it."""
        hold = self.holds.pop(key, None)
        if hold is None:
            return None
        self.accounts[hold.tenant].held -= hold.amount
        self._count_held(hold, -hold.amount)
        self.put_holds.pop(key, None)
        self.dropped_holds.add(key)
        self.touched.add(hold.tenant)
        return hold

    def check_limits(self, hold: StoredHold, more: int) -> Checked | None:
        """Checks `more` of a hold against the tenant's hard limits; None if none counts it.

        Raises `SpendLimitReached`; of several, the one that ends last.
        """
        found = self._spenders(hold)
        if not found:
            return None
        account = self.accounts[hold.tenant]
        over: list[SpendLimitReached] = []
        for spender, limit in found.items():
            spending = self.spending.get(spender, NOTHING)
            if more and spending.charged + spending.held + more > limit.amount:
                over.append(
                    reached(limit, spender, spending, needed=more, currency=account.currency)
                )
        if over:
            raise max(over, key=lambda each: (not each.passes, each.ends_ns))
        return Checked(account.seq, {limit.name: limit.version for limit in found.values()})

    def _spenders(self, hold: StoredHold) -> dict[Spender, SpendLimit]:
        limits = self.limits.get(hold.tenant)
        if not limits:
            return {}
        details = orjson.loads(hold.body)
        admitted_ns = details.get("admitted_ns", 0)
        found = ((limit.spender(details, admitted_ns), limit) for limit in limits)
        return {spender: limit for spender, limit in found if spender is not None}

    def _count_held(self, hold: StoredHold, more: int) -> None:
        if more:
            for spender in self._spenders(hold):
                self._count(spender, 0, more)

    def spend(self, charge: Entry, amount: int) -> None:
        """Counts a charge, or the change that a correction makes to it, for the hard limits."""
        limits = self.limits.get(charge.tenant, ())
        details = charge.details if limits else {}
        for limit in limits:
            spender = limit.spender(details, charge.moment_ns)
            if spender is not None:
                self._count(spender, amount, 0)

    def _count(self, spender: Spender, charged: int, held: int) -> None:
        self.spending[spender] = self.spending.get(spender, NOTHING).plus(charged, held)
        self.put_spending.add(spender)

    def post(
        self,
        account: TenantAccount,
        kind: Kind,
        request_id: str,
        postings: Postings,
        body: dict[str, Any],
        *,
        billed_ns: int = 0,
    ) -> Entry:
        """Appends an entry to the tenant's chain and updates its balances.

        It belongs to the day and month of `billed_ns`, or of now. A chain's dates never go back, so
        after an entry from a clock that was ahead, it gets that entry's date.
        """
        seq, at_ns = account.seq + 1, max(self.now_ns, account.at_ns)
        billed = billed_ns or self.now_ns
        if billed != at_ns:
            body = body | {"billed_ns": billed}
        text, record = format_postings(postings), canonical(body)
        fields = (account.tenant, seq, kind, request_id, at_ns, account.currency, text, record)
        account.head = digest(account.head, *fields)
        account.seq, account.at_ns = seq, at_ns
        entry = Entry(*fields, hash=account.head, billed_ns=body.get("billed_ns"))
        if body.get("by", SYSTEM) != SYSTEM:
            self.decisions.append((entry, account.worth))
        account.take(entry)
        self.new_entries.append(entry)
        self.entries.setdefault((account.tenant, request_id), []).append(entry)
        if "corrects" in body:
            self.corrections.setdefault((account.tenant, body["corrects"]), []).append(entry)
        self.touched.add(account.tenant)
        return entry


def insufficient_balance(
    tenant: str, *, needed: int, available: int, currency: str
) -> InsufficientBalance:
    """The refusal of a hold, with the amounts."""
    message = (
        f"insufficient balance: {format_units(needed)} {currency} is needed and "
        f"{format_units(max(0, available))} {currency} is available to tenant {tenant!r}; "
        "top up, or ask for fewer tokens"
    )
    return InsufficientBalance(
        message, tenant=tenant, needed=needed, available=available, currency=currency
    )
