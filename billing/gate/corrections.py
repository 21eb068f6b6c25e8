"""Corrections: a new entry refunds a charge, or a part of it, and refers to it."""

from billing.errors import AlreadyExists, InvalidAmount, InvalidName, UnknownHold
from billing.gate.commands import Correct
from billing.gate.entries import TENANT_ACCOUNTS, Entry, Kind
from billing.gate.postings import refund
from billing.gate.work import SYSTEM, Work
from billing.money import format_units
from billing.names import bare_id

OWN_REFERENCES = ("late:", "retry:", "failed:")  # of corrections made by the ledger itself


def taken_by(work: Work, charged: Entry) -> dict[str, int]:
    """What a charge took from each of the tenant's accounts, minus refunds since."""
    taken = dict.fromkeys(TENANT_ACCOUNTS, 0)
    for entry in (charged, *work.corrections.get((charged.tenant, charged.seq), ())):
        for name, units in entry.amounts.items():
            if name in taken:
                taken[name] -= units
    return taken


def cost_of(work: Work, charged: Entry) -> int:
    """The rest of a charge after refunds."""
    return sum(taken_by(work, charged).values())


def correct(work: Work, command: Correct) -> Entry:
    """Refunds a charge or a part of it. The request is named by its id or its answer's id."""
    own = command.reference.startswith(OWN_REFERENCES)
    if own and command.by != SYSTEM:
        raise InvalidName(f"reference {command.reference!r} begins as the ledger's own do")
    if command.by == SYSTEM and not own:
        raise InvalidName(f"{SYSTEM!r} is the server's own name; say who decides")
    names = (command.request_id, bare_id(command.request_id))
    found = (work.entry(command.tenant, name, Kind.CHARGE) for name in names)
    charged = next((entry for entry in found if entry is not None), None)
    if charged is None:
        raise UnknownHold(
            f"request {command.request_id!r} of tenant {command.tenant!r} was never charged"
        )
    standing = work.entry(command.tenant, command.reference, Kind.CORRECTION)
    if standing is None:
        return give_back(work, charged, command)
    amount = cost_of(work, charged) + standing.amount if command.amount is None else command.amount
    if (charged.seq, amount) != (standing.details["corrects"], standing.amount):
        raise AlreadyExists(
            f"reference {command.reference!r} was used for another correction; use a new one"
        )
    return standing


def give_back(work: Work, charged: Entry, command: Correct) -> Entry:
    """Refunds a charge, or `command.amount` of it, to the accounts it was taken from."""
    account = work.account(charged.tenant)
    taken = taken_by(work, charged)
    left = sum(taken.values())
    amount = left if command.amount is None else command.amount
    if not left and command.by != SYSTEM:
        raise InvalidAmount(
            f"the charge of request {charged.request_id!r} was given back completely"
        )
    if not 0 <= amount <= left:
        raise InvalidAmount(
            f"request {charged.request_id!r} has {format_units(left)} {charged.currency} left of "
            f"its charge; {format_units(amount)} cannot be given back"
        )
    postings = refund(account, taken, amount)
    body = {"corrects": charged.seq, "by": command.by, "reason": command.reason}
    work.spend(charged, -amount)
    return work.post(account, Kind.CORRECTION, command.reference, postings, body)
