"""The money gate: commands applied to accounts, holds and entries in memory. Pure; no clock, no
store.

The ledger thread loads what a batch of commands touches into a `Work`, applies them one by one, and
writes the changes in one transaction. A command either applies completely or raises and changes
nothing, so a refusal does not affect the rest of its batch.
"""

from collections.abc import Iterable
from dataclasses import replace

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
    Reap,
    Reserve,
    Settle,
    TopUp,
)
from billing.gate.corrections import correct, taken_by
from billing.gate.delivery import note_delivery
from billing.gate.deposits import adjust, deposit
from billing.gate.entries import Entry, Kind
from billing.gate.grants import expire
from billing.gate.holds import (
    Hold,
    StoredHold,
    decode_request,
    encode_request,
    is_answered,
    request_body,
)
from billing.gate.outcomes import PRESUMED
from billing.gate.postings import refund, spend
from billing.gate.work import Settled, TenantAccount, Work, insufficient_balance
from billing.prices.rating import Charge, rate
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
    account = work.account(command.hold.tenant)
    charged = work.entry(*command.hold.key, Kind.CHARGE)
    if charged is not None:
        return _settle_again(work, command, charged)
    usage = _billable(command)
    charge = rate(usage, command.hold.pinned)
    held = work.drop_hold(command.hold.key)
    entry = _post_charge(work, account, command, held, charge)
    work.spend(entry, charge.amount)
    note_delivery(work, command, entry, answered=held is not None and is_answered(held))
    return Settled(entry, charge, usage)


def _billable(command: Settle) -> Usage:
    return policy.billable(command.usage, command.outcome, delivered=command.delivered)


def _post_charge(
    work: Work, account: TenantAccount, command: Settle, held: StoredHold | None, charge: Charge
) -> Entry:
    """Takes a charge from the tenant's money. The body has what `verify` rates and checks again."""
    hold, usage = command.hold, _billable(command)
    body = request_body(hold.pinned.ref, hold.context) | {
        "usage": usage.record(),
        "outcome": command.outcome,
        "saved": str(charge.saved),
        "fees": str(charge.fees) if charge.fees else "",
    }
    if usage != command.usage:
        body["unbilled"] = command.usage.record()
    if held is not None and held.checked is not None:
        limits = dict(held.checked.limits)
        body |= {"held": str(held.amount), "checked_at": held.checked.at, "limits": limits}
    postings = spend(account, charge.amount)
    admitted_ns = hold.context.admitted_ns
    return work.post(account, Kind.CHARGE, hold.request_id, postings, body, billed_ns=admitted_ns)


def _settle_again(work: Work, command: Settle, charged: Entry) -> Settled:
    """A repeated settlement.

    It changes nothing, unless the first was presumed by the sweeper or recovery, or this one says
    that the answer was lost after all.
    """
    work.drop_hold(command.hold.key)
    corrections = work.corrections.get((charged.tenant, charged.seq), [])
    late = next((entry for entry in corrections if "card" in entry.details), None)
    usage = Usage.from_record((late or charged).details.get("usage", {}))
    is_presumed = charged.details["outcome"] in PRESUMED and not corrections  # by an admin
    if is_presumed:
        usage = _amend(work, command, charged, usage)
    if is_presumed or not command.delivered:
        note_delivery(work, command, charged)
    return Settled(charged, rate(usage, command.hold.pinned), usage, repeated=True)


def _amend(work: Work, command: Settle, charged: Entry, was: Usage) -> Usage:
    """Corrects a presumed charge to what the server itself settles. Returns the usage billed."""
    hold, usage = command.hold, _billable(command)
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
    return usage


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
