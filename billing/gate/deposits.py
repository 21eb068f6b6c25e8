"""Money in and out: deposits, withdrawals, chargebacks, and corrections of deposits.

Each is a person's decision, is booked once per reference, and adds one entry. A mistyped deposit
stays in the chain: an `adjustment` books the difference and refers to it.
"""

from billing.errors import AlreadyExists, InvalidAmount, InvalidName, UnknownDeposit
from billing.gate.commands import Adjust, Deposit
from billing.gate.entries import Entry, Kind
from billing.gate.grants import check_not_over, grant_of
from billing.gate.postings import deposited
from billing.gate.work import SYSTEM, TenantAccount, Work, insufficient_balance
from billing.money import format_units

INCOMING = (Kind.GRANT, Kind.TOPUP)


def deposit(work: Work, command: Deposit) -> Entry:
    account = work.account(command.tenant)
    _decided(command.by)
    gain = command.amount if command.kind in INCOMING else -command.amount
    standing = work.entry(command.tenant, command.reference, command.kind)
    if standing is not None:
        _check_repeat(standing, command, gain)
        return standing
    if command.kind is Kind.WITHDRAWAL:
        _check_withdrawal(account, command.amount)
    body: dict[str, object] = {"by": command.by, "reason": command.reason}
    if command.expires_ns:
        body["expires_ns"] = command.expires_ns
    postings = deposited(account, command.kind, gain)
    return work.post(account, command.kind, command.reference, postings, body)


def adjust(work: Work, command: Adjust) -> Entry:
    """Corrects a deposit's amount. What was already spent of it becomes debt."""
    account = work.account(command.tenant)
    _decided(command.by)
    found = (work.entry(command.tenant, command.deposit, kind) for kind in INCOMING)
    mistyped = next((entry for entry in found if entry is not None), None)
    if mistyped is None:
        raise UnknownDeposit(
            f"tenant {command.tenant!r} has no top-up and no grant with reference "
            f"{command.deposit!r}; see `cachesvc balance history`"
        )
    before = work.corrections.get((mistyped.tenant, mistyped.seq), ())
    check_not_over(grant_of(mistyped, before))
    standing = work.entry(command.tenant, command.reference, Kind.ADJUSTMENT)
    others = [entry for entry in before if entry != standing]
    difference = command.amount - mistyped.amount - sum(entry.amount for entry in others)
    if standing is not None:
        if (standing.details["corrects"], standing.amount) != (mistyped.seq, difference):
            raise AlreadyExists(
                f"reference {command.reference!r} was used for another adjustment; use a new one"
            )
        return standing
    if not difference:
        amount = format_units(command.amount)
        raise InvalidAmount(f"deposit {command.deposit!r} is already {amount} {account.currency}")
    body = {"corrects": mistyped.seq, "by": command.by, "reason": command.reason}
    postings = deposited(account, mistyped.kind, difference)
    return work.post(account, Kind.ADJUSTMENT, command.reference, postings, body)


def _check_repeat(standing: Entry, command: Deposit, gain: int) -> None:
    """Raises unless a repeated reference is the same deposit."""
    details = standing.details
    same = {
        "amount": standing.amount == gain,
        "expiry": details.get("expires_ns", 0) == command.expires_ns,
    }
    for what, is_same in same.items():
        if not is_same:
            raise AlreadyExists(
                f"reference {command.reference!r} was used for another {what}; use a new one"
            )


def _decided(by: str) -> None:
    if by == SYSTEM:
        raise InvalidName(f"{SYSTEM!r} is the server's own name; say who decides")


def _check_withdrawal(account: TenantAccount, amount: int) -> None:
    """Raises unless the amount is paid money that is neither spent nor on hold."""
    held_beyond = max(0, account.held - account.balances["granted"])
    available = account.balances["topup"] - held_beyond
    if amount > available:
        raise insufficient_balance(
            account.tenant, needed=amount, available=available, currency=account.currency
        )
