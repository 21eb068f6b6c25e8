"""Money held for a server in advance, out of which it gives holds without waiting. Pure.

An advance is part of what an account holds, so whoever else spends the balance, in any process,
cannot spend it too. A hold that a server gave out of its advance is booked behind the answer and
moves that much from the one to the other. An advance has a lease and a run: what a dead server
had is given back by its next start, or by any other server once the lease is over.
"""

from billing.gate.commands import Allot, Reserve
from billing.gate.holds import Advance
from billing.gate.work import TenantAccount, Work

SHARE = 8  # an advance is at most this part of what is available


def draw(work: Work, command: Reserve) -> int:
    """What of the hold's amount its server's advance covers; 0 for a hold that drew nothing."""
    standing = _standing(work, command.hold.tenant, command.owner, command.boot)
    return min(standing.amount, command.amount) if command.drawn and standing else 0


def drawn(work: Work, command: Reserve, amount: int) -> None:
    """Takes from the advance what went into the hold."""
    standing = work.advances[command.hold.tenant, command.owner]
    work.put_advance(standing.left(standing.amount - amount))


def allot(work: Work, command: Allot) -> int:
    """Raise an advance to `command.amount`, or give all of it back with 0; by how much.

    Nothing is given to a suspended tenant, nor to one whose balance it would be much of: near the
    limit every hold asks the account itself, and money that is left is never out of reach.
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
    return max(0, amount - before) if is_rich and not account.suspended else 0


def _standing(work: Work, tenant: str, owner: str, boot: str) -> Advance | None:
    found = work.advances.get((tenant, owner))
    return found if found is not None and found.boot == boot else None
