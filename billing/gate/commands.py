"""The commands of the money gate. `billing.ledger` creates these values and `billing.gate.gate`
applies them.

Each names every key it touches, so that the store can read and lock them first.
"""

from dataclasses import dataclass

from billing.gate.entries import Kind
from billing.gate.holds import Hold
from billing.gate.outcomes import Outcome
from billing.names import bare_id
from billing.usage import Usage

Key = tuple[str, str]  # tenant, request id


@dataclass(frozen=True, slots=True)
class Reserve:
    """Holds `amount` of the tenant's balance for a request, until `expires_ns`."""

    hold: Hold
    amount: int
    expires_ns: int
    owner: str
    boot: str


@dataclass(frozen=True, slots=True)
class TopUp:
    """Raises the hold by `amount` (zero only renews) and records progress, if given."""

    hold: Hold
    amount: int
    expires_ns: int
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Settle:
    """Charges a request its usage and ends its hold."""

    hold: Hold
    usage: Usage
    outcome: Outcome
    delivered: bool  # False only if no byte of the answer reached the client


@dataclass(frozen=True, slots=True)
class Reap:
    """Settles an abandoned hold from its recorded progress."""

    tenant: str
    request_id: str
    outcome: Outcome
    expired_at_ns: int | None  # do nothing if it was renewed past this; None: always settle


@dataclass(frozen=True, slots=True)
class Deposit:
    """A grant, top-up, withdrawal or chargeback, booked once per `reference`."""

    tenant: str
    kind: Kind
    reference: str
    amount: int
    by: str
    reason: str = ""
    expires_ns: int = 0  # of a grant that expires


@dataclass(frozen=True, slots=True)
class Expire:
    """Ends the grant of this reference, if it has expired."""

    tenant: str
    reference: str


@dataclass(frozen=True, slots=True)
class Adjust:
    """Corrects the deposit of reference `deposit` to `amount`."""

    tenant: str
    deposit: str
    reference: str
    amount: int
    by: str
    reason: str


@dataclass(frozen=True, slots=True)
class Correct:
    """Refunds `amount` of a request's charge, or all that is left of it."""

    tenant: str
    request_id: str
    reference: str
    amount: int | None
    by: str
    reason: str


Command = Reserve | TopUp | Settle | Reap | Deposit | Expire | Adjust | Correct


def moves_money(command: Command) -> bool:
    """Whether a command may write an entry. A hold is not an entry and ends with its request."""
    return not isinstance(command, Reserve | TopUp)


def keys_of(command: Command) -> list[Key]:
    """The (tenant, request id) pairs whose holds and entries a command needs."""
    match command:
        case Reserve(hold) | TopUp(hold):
            return [hold.key]
        case Settle(hold):
            return [hold.key]
        case Reap(tenant, request_id):
            return [(tenant, request_id)]
        case Deposit(tenant, _, reference):
            return [(tenant, reference)]
        case Expire(tenant, reference):
            return [(tenant, reference)]
        case Adjust(tenant, deposit, reference):
            return [(tenant, deposit), (tenant, reference)]
        case Correct(tenant, request_id, reference):
            names = {request_id, bare_id(request_id), reference}
            return [(tenant, name) for name in sorted(names)]


def fingerprint_of(command: Command) -> Key | None:
    """The (tenant, fingerprint) whose undelivered answers a command refunds."""
    if isinstance(command, Settle) and command.hold.context.is_retry:
        fingerprint = command.hold.context.fingerprint
        return (command.hold.tenant, fingerprint) if fingerprint else None
    return None
