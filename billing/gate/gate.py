"""The money gate: commands applied to accounts, holds and entries in memory. Pure; no clock, no
store.

The ledger thread loads what a batch of commands touches into a `Work`, applies them one by one, and
writes the changes in one transaction. A command either applies completely or raises and changes
nothing, so a refusal does not affect the rest of its batch.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from billing.errors import (
    BillingError,
    CurrencyMismatch,
    DuplicateRequest,
    TenantSuspended,
    UnknownHold,
)
from billing.gate import outcomes as policy
from billing.gate.commands import (
    Adjust,
    Command,
    Correct,
    Deposit,
    Expire,
    Key,
    Reap,
    Reserve,
    Settle,
    TopUp,
)
from billing.gate.corrections import correct, cost_of, give_back, taken_by
from billing.gate.deposits import adjust, deposit
from billing.gate.entries import (
    Entry,
    Kind,
)
from billing.gate.grants import expire
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
from billing.gate.postings import refund, spend
from billing.gate.work import SYSTEM, Settled, TenantAccount, Work, insufficient_balance
from billing.prices.rating import rate
from billing.usage import Usage


def apply(work: Work, command: Command) -> object:
    """Applies one command. Returns its result, or raises a `BillingError` and changes nothing."""
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
            return deposit(work, command)
        case Expire():
            return expire(work, command)
        case Adjust():
            return adjust(work, command)
        case Correct():
            return correct(work, command)


def apply_all(work: Work, commands: Iterable[Command]) -> list[object]:
    """Applies a batch in order. The result of a refused command is its exception."""
    results: list[object] = []
    for command in commands:
        try:
            results.append(apply(work, command))
        except BillingError as error:
            results.append(error)
    return results


def _check_available(account: TenantAccount, amount: int) -> None:
    available = account.available
    if available is None or amount <= max(0, available):
        return
    raise insufficient_balance(
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
    if work.holds.get(hold.key) == held:  # committed by an attempt that did not learn of it
        return hold
    known = hold.key in work.holds or work.entry(*hold.key, Kind.CHARGE) is not None
    if known:
        raise DuplicateRequest(f"request {hold.request_id!r} was reserved already")
    if account.suspended:
        raise TenantSuspended(f"tenant {hold.tenant!r} is suspended; ask the operator why")
    if hold.pinned.currency != account.currency:
        raise CurrencyMismatch(
            f"the price is in {hold.pinned.currency}, tenant {hold.tenant!r} pays in "
            f"{account.currency}; apply a rate card in {account.currency}"
        )
    checked = work.check_limits(held, held.amount)
    _check_available(account, command.amount)
    work.put_hold(replace(held, checked=checked))
    return hold


def _top_up(work: Work, command: TopUp) -> int:
    stored = work.holds.get(command.hold.key)
    if stored is None:
        raise UnknownHold(f"request {command.hold.request_id!r} holds nothing; it was settled")
    checked = stored.checked
    if command.amount:
        checked = work.check_limits(stored, command.amount)
    _check_available(work.account(stored.tenant), command.amount)
    held = replace(
        stored,
        amount=stored.amount + command.amount,
        expires_ns=max(stored.expires_ns, command.expires_ns),
        usage=stored.usage if command.usage is None else command.usage,
        checked=checked,
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
        "fees": str(charge.fees) if charge.fees else "",
    }
    if usage != command.usage:
        body["unbilled"] = command.usage.record()
    stored = work.holds.get(hold.key)
    if stored is not None:
        body |= _checked_body(stored)
    work.drop_hold(hold.key)
    postings = spend(account, charge.amount)
    admitted_ns = hold.context.admitted_ns
    entry = work.post(account, Kind.CHARGE, hold.request_id, postings, body, billed_ns=admitted_ns)
    work.spend(entry, charge.amount)
    _note_delivery(work, command, entry, answered=stored is not None and is_answered(stored))
    return Settled(entry, charge, usage)


def _checked_body(stored: StoredHold) -> dict[str, Any]:
    """The limits that a hold was last checked under, for its charge's body."""
    if stored.checked is None:
        return {}
    limits = dict(stored.checked.limits)
    return {"held": str(stored.amount), "checked_at": stored.checked.at, "limits": limits}


def _billable(command: Settle) -> Usage:
    return policy.billable(command.usage, command.outcome, delivered=command.delivered)


def _settle_again(work: Work, command: Settle, charged: Entry) -> Settled:
    """A repeated settlement.

    It changes nothing, unless the first was presumed by the sweeper or recovery, or this one says
    that the answer was lost after all.
    """
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
        if difference > 0:
            postings = spend(account, difference)
        else:
            postings = refund(account, taken_by(work, charged), -difference)
        body = request_body(hold.pinned.ref, hold.context) | {
            "corrects": charged.seq,
            "usage": usage.record(),
            "outcome": command.outcome,
            "reason": "settled after its hold had been ended",
        }
        work.post(account, Kind.CORRECTION, f"late:{hold.request_id}", postings, body)
        work.spend(charged, difference)
        was = usage
        _note_delivery(work, command, charged)
    elif not command.delivered:
        _note_delivery(work, command, charged)
    return Settled(charged, rate(was, hold.pinned), was, repeated=True)


def _may_amend(work: Work, charged: Entry) -> bool:
    """Whether a presumed charge may be replaced by the server's own, i.e. no admin has corrected
    it."""
    presumed = charged.details["outcome"] in PRESUMED
    return presumed and not work.corrections.get((charged.tenant, charged.seq))


def _note_delivery(work: Work, command: Settle, entry: Entry, *, answered: bool = False) -> None:
    """Records an answer that never arrived. A delivered retry pays instead of it, not in addition,
    whichever of the two is settled first.
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
    elif not command.delivered and cost_of(work, entry):
        work.put_undelivered.add((key, entry.request_id))
        work.undelivered.setdefault(key, []).append(entry)  # a retry may be in the same batch


def _forgive(work: Work, lost: Iterable[Entry]) -> None:
    """Refunds charges of lost answers whose retry was delivered."""
    reason = "the answer was not delivered, and its retry was"
    for entry in lost:
        if cost_of(work, entry):  # else it was free or already refunded by an admin
            reference = f"retry:{entry.request_id}"
            command = Correct(entry.tenant, entry.request_id, reference, None, SYSTEM, reason)
            give_back(work, entry, command)


def _tell_running(work: Work, fingerprint: Key) -> None:
    """Marks running requests whose retry has been delivered."""
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
