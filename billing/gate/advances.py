"""Money held in advance for a server, from which it gives holds without waiting. Pure.

An advance counts as held in the account, so no other process can spend it. A hold given from an
advance is booked after the answer and moves its amount from the advance to the hold. An advance has
a lease and belongs to one run of a server. After a crash it is returned by the server's next start,
or by any server once the lease is over.
"""

from billing.gate.commands import Allot, Reserve
from billing.gate.holds import Advance
from billing.gate.work import TenantAccount, Work

SHARE = 8  # an advance is at most this part of what is available


def draw(work: Work, command: Reserve) -> int:
    """The part of the hold's amount that its server's advance covers; 0 if it drew nothing."""
    standing = _standing(work, command.hold.tenant, command.owner, command.boot)
    return min(standing.amount, command.amount) if command.drawn and standing else 0


def drawn(work: Work, command: Reserve, amount: int) -> None:
    """Subtracts the drawn amount from the advance."""
    standing = work.advances[command.hold.tenant, command.owner]
    work.put_advance(standing.left(standing.amount - amount))


def allot(work: Work, command: Allot) -> int:
    """Raises an advance to `command.amount`, or returns all of it with 0. Returns the change.

    A suspended tenant gets nothing, nor does one for whom it would be a large part of the balance.
    Near the limit every hold asks the account itself, so the remaining money stays available. A
    tenant with hard limits gets nothing either, because a hold from an advance is not checked.
    """
    standing = _standing(work, command.tenant, command.owner, command.boot)
    before = standing.amount if standing else 0
    if command.amount:
        more = _affordable(work.account(command.tenant), command.amount, before)
        if more:
            key = (command.tenant, command.owner, command.boot)
            work.put_advance(Advance(*key, before + more, command.expires_ns))
        return more
    over_ns = command.if_expired_ns
    if standing is None or (over_ns is not None and standing.expires_ns > over_ns):
        return 0
    work.put_advance(standing.left(0))
    return -before


def _affordable(account: TenantAccount, amount: int, before: int) -> int:
    available = account.available
    is_rich = available is None or amount * SHARE <= available + before
    is_refused = account.suspended or account.limited
    return max(0, amount - before) if is_rich and not is_refused else 0


def _standing(work: Work, tenant: str, owner: str, boot: str) -> Advance | None:
    found = work.advances.get((tenant, owner))
    return found if found is not None and found.boot == boot else None
