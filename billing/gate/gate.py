"""The money gate: commands applied to accounts, holds and entries in memory. Pure; no clock, no
store.

The ledger thread loads what a batch of commands touches into a `Work`, applies them one by one, and
writes what changed in one transaction. A command either changes everything it must or raises and
changes nothing, so one refusal leaves the rest of its batch alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from billing.errors import (
    AlreadyExists,
    BillingError,
    CurrencyMismatch,
    DuplicateRequest,
    InsufficientBalance,
    InvalidAmount,
    InvalidName,
    TenantSuspended,
    UnknownHold,
    UnknownTenant,
)
from billing.gate import outcomes as policy
from billing.gate.commands import Command, Correct, Deposit, Key, Reap, Reserve, Settle, TopUp
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
from billing.gate.holds import (
    Hold,
    StoredHold,
    answered,
    decode_request,
    encode_request,
    is_answered,
    request_body,
)
from billing.gate.outcomes import PRESUMED
from billing.money import format_units
from billing.prices.book import PriceBook
from billing.prices.rating import Charge, rate
from billing.usage import Usage

SYSTEM = "system"  # who posts what no person decided
OWN_REFERENCES = ("late:", "retry:")  # of the corrections that it makes itself


@dataclass(slots=True)
class Account:
    """A tenant's projection: what its entries and holds sum to, and where its chain ends."""

    tenant: str
    currency: str
    credit_limit: int | None  # how far below zero it may go: 0 is prepaid, None is unlimited
    suspended: bool
    head: bytes
    seq: int = 0
    at_ns: int = 0
    held: int = 0
    balances: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ACCOUNTS, 0))

    @property
    def worth(self) -> int:
        return sum(self.balances[name] for name in TENANT_ACCOUNTS)

    @property
    def available(self) -> int | None:
        """What a new hold may take; None is unlimited."""
        return None if self.credit_limit is None else self.worth + self.credit_limit - self.held


@dataclass(frozen=True, slots=True)
class Settled:
    """A request's charge as it stands. `repeated` when it had been settled before."""

    entry: Entry
    charge: Charge
    usage: Usage
    repeated: bool = False


@dataclass(slots=True)
class Work:
    """What one transaction read, and what it is to write. Mutated by `apply` alone."""

    book: PriceBook
    now_ns: int
    accounts: dict[str, Account]
    holds: dict[Key, StoredHold] = field(default_factory=dict)
    entries: dict[Key, list[Entry]] = field(default_factory=dict)
    undelivered: dict[Key, list[Entry]] = field(default_factory=dict)  # by fingerprint
    corrections: dict[tuple[str, int], list[Entry]] = field(
        default_factory=dict
    )  # by corrected seq
    new_entries: list[Entry] = field(default_factory=list)
    put_holds: dict[Key, StoredHold] = field(default_factory=dict)
    dropped_holds: set[Key] = field(default_factory=set)
    decisions: list[tuple[Entry, int]] = field(default_factory=list)  # an admin's, and worth before
    touched: set[str] = field(default_factory=set)  # tenants whose account row changes
    put_undelivered: set[tuple[Key, str]] = field(default_factory=set)  # fingerprint, request id
    dropped_undelivered: set[Key] = field(default_factory=set)

    def account(self, tenant: str) -> Account:
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
        self.accounts[hold.tenant].held += hold.amount - (before.amount if before else 0)
        self.holds[hold.key] = self.put_holds[hold.key] = hold
        self.dropped_holds.discard(hold.key)
        self.touched.add(hold.tenant)

    def drop_hold(self, key: Key) -> None:
        hold = self.holds.pop(key, None)
        if hold is None:
            return
        self.accounts[hold.tenant].held -= hold.amount
        self.put_holds.pop(key, None)
        self.dropped_holds.add(key)
        self.touched.add(hold.tenant)

    def post(
        self,
        account: Account,
        kind: Kind,
        request_id: str,
        postings: Postings,
        body: dict[str, Any],
    ) -> Entry:
        """Append an entry to the tenant's chain and move its balances."""
        text, record = format_postings(postings), canonical(body)
        seq, at_ns = account.seq + 1, max(self.now_ns, account.at_ns)
        fields = (account.tenant, seq, kind, request_id, at_ns, account.currency, text, record)
        account.head = digest(account.head, *fields)
        account.seq, account.at_ns = seq, at_ns
        entry = Entry(*fields, hash=account.head)
        if body.get("by", SYSTEM) != SYSTEM:
            self.decisions.append((entry, account.worth))
        for name, units in postings.items():
            account.balances[name] += units
        self.new_entries.append(entry)
        self.entries.setdefault((account.tenant, request_id), []).append(entry)
        if "corrects" in body:
            self.corrections.setdefault((account.tenant, body["corrects"]), []).append(entry)
        self.touched.add(account.tenant)
        return entry


def apply(work: Work, command: Command) -> object:
    """Apply one command. Returns its result or raises a `BillingError`, having changed nothing."""
    match command:
        case Reserve():
            return _reserve(work, command)
        case TopUp():
            return _top_up(work, command)
        case Settle():
            return _settle(work, command)
        case Reap():
            return _reap(work, command)
        case Deposit():
            return _deposit(work, command)
        case Correct():
            return _correct(work, command)


def apply_all(work: Work, commands: Iterable[Command]) -> list[object]:
    """Apply a batch in order; a refused command's result is its exception."""
    results: list[object] = []
    for command in commands:
        try:
            results.append(apply(work, command))
        except BillingError as error:
            results.append(error)
    return results


def _take(account: Account, amount: int) -> None:
    available = account.available
    if available is not None and amount > 0 and amount > available:
        raise InsufficientBalance(
            account.tenant, needed=amount, available=available, currency=account.currency
        )


def _reserve(work: Work, command: Reserve) -> Hold:
    hold = command.hold
    account = work.account(hold.tenant)
    held = StoredHold(
        tenant=hold.tenant,
        request_id=hold.request_id,
        amount=command.amount,
        expires_ns=command.expires_ns,
        owner=command.owner,
        boot=command.boot,
        body=encode_request(hold),
    )
    if work.holds.get(hold.key) == held:  # committed by a try that did not hear of it
        return hold
    if hold.key in work.holds or work.entry(*hold.key, Kind.CHARGE):
        raise DuplicateRequest(f"request {hold.request_id!r} was reserved already")
    if account.suspended:
        raise TenantSuspended(f"tenant {hold.tenant!r} is suspended; ask the operator why")
    if hold.pinned.currency != account.currency:
        raise CurrencyMismatch(
            f"the price is in {hold.pinned.currency}, tenant {hold.tenant!r} pays in "
            f"{account.currency}; apply a rate card in {account.currency}"
        )
    _take(account, command.amount)
    work.put_hold(held)
    return hold


def _top_up(work: Work, command: TopUp) -> int:
    stored = work.holds.get(command.hold.key)
    if stored is None:
        raise UnknownHold(f"request {command.hold.request_id!r} holds nothing; it was settled")
    _take(work.account(stored.tenant), command.amount)
    held = StoredHold(
        tenant=stored.tenant,
        request_id=stored.request_id,
        amount=stored.amount + command.amount,
        expires_ns=max(stored.expires_ns, command.expires_ns),
        owner=stored.owner,
        boot=stored.boot,
        body=stored.body,
        usage=stored.usage if command.usage is None else command.usage,
    )
    work.put_hold(held)
    return held.amount


def _settle(work: Work, command: Settle) -> Settled:
    hold, usage = command.hold, _billable(command)
    account = work.account(hold.tenant)
    charged = work.entry(*hold.key, Kind.CHARGE)
    if charged is not None:
        return _settle_again(work, command, charged)
    charge = rate(usage, hold.pinned)
    body = request_body(hold.pinned.ref, hold.context) | {
        "usage": usage.record(),
        "outcome": command.outcome,
        "saved": str(charge.saved),
    }
    if usage != command.usage:
        body["unbilled"] = command.usage.record()
    stored = work.holds.get(hold.key)
    work.drop_hold(hold.key)
    entry = work.post(account, Kind.CHARGE, hold.request_id, spend(account, charge.amount), body)
    _note_delivery(work, command, entry, answered=stored is not None and is_answered(stored))
    return Settled(entry, charge, usage)


def _billable(command: Settle) -> Usage:
    return policy.billable(command.usage, command.outcome, delivered=command.delivered)


def _settle_again(work: Work, command: Settle, charged: Entry) -> Settled:
    """A second settlement changes nothing, unless the first was presumed by sweeper or recovery,
    or says that the answer was lost after all."""
    hold, details = command.hold, charged.details
    work.drop_hold(hold.key)
    was = Usage.from_record(details.get("usage", {}))
    usage = _billable(command)
    corrections = work.corrections.get((charged.tenant, charged.seq), [])
    late = next((entry for entry in corrections if "card" in entry.details), None)
    if late is not None:
        was = Usage.from_record(late.details.get("usage", {}))
    elif _may_amend(work, charged):
        account = work.account(hold.tenant)
        difference = rate(usage, hold.pinned).amount - rate(was, hold.pinned).amount
        postings = spend(account, difference) if difference > 0 else None
        body = request_body(hold.pinned.ref, hold.context) | {
            "corrects": charged.seq,
            "usage": usage.record(),
            "outcome": command.outcome,
            "reason": "settled after its hold had been ended",
        }
        postings = postings or refund(account, taken_by(work, charged), -difference)
        work.post(account, Kind.CORRECTION, f"late:{hold.request_id}", postings, body)
        was = usage
        _note_delivery(work, command, charged)
    elif not command.delivered:
        _note_delivery(work, command, charged)
    return Settled(charged, rate(was, hold.pinned), was, repeated=True)


def _may_amend(work: Work, charged: Entry) -> bool:
    """A presumed charge yields to the server's own word, unless an admin corrected it meanwhile."""
    presumed = charged.details["outcome"] in PRESUMED
    return presumed and not work.corrections.get((charged.tenant, charged.seq))


def _note_delivery(work: Work, command: Settle, entry: Entry, *, answered: bool = False) -> None:
    """Remember an answer that never arrived; a retry that arrives pays instead of it, not as
    well, whichever of the two is settled first.
    """
    context = command.hold.context
    if not context.fingerprint or command.outcome in PRESUMED:
        return
    key = (entry.tenant, context.fingerprint)
    if command.delivered and context.is_retry:
        _forgive(work, [other for other in work.undelivered.pop(key, ()) if other != entry])
        work.put_undelivered = {row for row in work.put_undelivered if row[0] != key}
        work.dropped_undelivered.add(key)
        _tell_running(work, key)
    elif not command.delivered and answered:
        _forgive(work, [entry])
    elif not command.delivered and _cost(work, entry):
        work.put_undelivered.add((key, entry.request_id))
        work.undelivered.setdefault(key, []).append(entry)  # a retry may be in the same batch


def _forgive(work: Work, lost: Iterable[Entry]) -> None:
    """Give back charges of answers that were lost, whose retry arrived."""
    reason = "the answer was not delivered, and its retry was"
    for entry in lost:
        if _cost(work, entry):  # else it was free, or was given back by an admin
            reference = f"retry:{entry.request_id}"
            command = Correct(entry.tenant, entry.request_id, reference, None, SYSTEM, reason)
            give_back(work, entry, command)


def _tell_running(work: Work, fingerprint: Key) -> None:
    """Mark the requests that a retry was delivered for while they still run."""
    for hold in list(work.holds.values()):
        if (hold.tenant, decode_request(hold.body)[1].fingerprint) == fingerprint:
            work.put_hold(answered(hold))


def _reap(work: Work, command: Reap) -> Settled | None:
    stored = work.holds.get((command.tenant, command.request_id))
    renewed = (
        stored is not None
        and command.expired_at_ns is not None
        and stored.expires_ns > command.expired_at_ns
    )
    if stored is None or renewed:
        return None
    ref, context = decode_request(stored.body)
    hold = Hold(stored.tenant, stored.request_id, work.book.pinned(ref), context)
    return _settle(work, Settle(hold, stored.usage, command.outcome, delivered=True))


def _deposit(work: Work, command: Deposit) -> Entry:
    account = work.account(command.tenant)
    standing = work.entry(command.tenant, command.reference, command.kind)
    if standing is not None:
        if standing.amount != command.amount:
            raise AlreadyExists(
                f"reference {command.reference!r} was used for another amount; use a new one"
            )
        return standing
    source = "promotion" if command.kind is Kind.GRANT else "cash"
    postings = {source: -command.amount}
    if command.kind is Kind.GRANT:
        postings["granted"] = command.amount
    else:
        postings |= pay_in(account, command.amount)
    body = {"by": command.by, "reason": command.reason}
    return work.post(account, command.kind, command.reference, postings, body)


def pay_in(account: Account, amount: int) -> dict[str, int]:
    """Money paid in settles what is owed first."""
    owed = min(amount, -account.balances["receivable"])
    return {"receivable": owed, "topup": amount - owed}


def spend(account: Account, amount: int) -> dict[str, int]:
    """Postings of a charge: granted money first, then paid money, the rest is owed."""
    granted = min(amount, max(0, account.balances["granted"]))
    topup = min(amount - granted, max(0, account.balances["topup"]))
    owed = amount - granted - topup
    return {"granted": -granted, "topup": -topup, "receivable": -owed, "revenue": amount}


def refund(account: Account, taken: Postings, amount: int) -> dict[str, int]:
    """Postings that give back `amount` of what was `taken`: paid money first, granted money last.

    Money that goes back settles what is owed before it can be spent again.
    """
    paid = min(amount, sum(taken.values()) - taken["granted"])
    return {**pay_in(account, paid), "granted": amount - paid, "revenue": -amount}


def taken_by(work: Work, charged: Entry) -> dict[str, int]:
    """What a charge took from each of the tenant's accounts, less what was given back since."""
    taken = dict.fromkeys(TENANT_ACCOUNTS, 0)
    for entry in (charged, *work.corrections.get((charged.tenant, charged.seq), ())):
        for name, units in entry.amounts.items():
            if name in taken:
                taken[name] -= units
    return taken


def _cost(work: Work, charged: Entry) -> int:
    """What is left of a charge."""
    return sum(taken_by(work, charged).values())


def _correct(work: Work, command: Correct) -> Entry:
    if command.reference.startswith(OWN_REFERENCES):
        raise InvalidName(f"reference {command.reference!r} begins as the ledger's own do")
    charged = work.entry(command.tenant, command.request_id, Kind.CHARGE)
    if charged is None:
        raise UnknownHold(
            f"request {command.request_id!r} of tenant {command.tenant!r} was never charged"
        )
    standing = work.entry(command.tenant, command.reference, Kind.CORRECTION)
    if standing is None:
        return give_back(work, charged, command)
    amount = _cost(work, charged) + standing.amount if command.amount is None else command.amount
    if (charged.seq, amount) != (standing.details["corrects"], standing.amount):
        raise AlreadyExists(
            f"reference {command.reference!r} was used for another correction; use a new one"
        )
    return standing


def give_back(work: Work, charged: Entry, command: Correct) -> Entry:
    """Return a charge, or `command.amount` of it, to the accounts it was taken from."""
    account = work.account(charged.tenant)
    taken = taken_by(work, charged)
    left = sum(taken.values())
    amount = left if command.amount is None else command.amount
    if not 0 <= amount <= left:
        raise InvalidAmount(
            f"request {charged.request_id!r} has {format_units(left)} {charged.currency} left of "
            f"its charge; {format_units(amount)} cannot be given back"
        )
    body = {"corrects": charged.seq, "by": command.by, "reason": command.reason}
    postings = refund(account, taken, amount)
    return work.post(account, Kind.CORRECTION, command.reference, postings, body)
