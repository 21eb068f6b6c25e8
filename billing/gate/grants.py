"""Expiring grants, and what is left of each. Pure; used by both the gate and the audit.

All granted money is one balance. The unspent part is attributed to the grants that expire last, so
spending always counts against the grant that expires first. When a grant expires, the part not
attributed to later grants is removed.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from billing.errors import InvalidAmount, UnknownDeposit
from billing.gate.commands import Expire
from billing.gate.entries import Entry, Kind
from billing.gate.work import NEVER, SYSTEM, Work


@dataclass(slots=True)
class Grant:
    """A grant. `amount` includes adjustments."""

    seq: int
    reference: str
    amount: int
    expires_ns: int = NEVER
    is_over: bool = False

    @property
    def order(self) -> tuple[int, int]:
        return self.expires_ns, self.seq


def remaining(grants: Iterable[Grant], balance: int) -> dict[int, int]:
    """What is left of each unexpired grant, by its entry's number."""
    left: dict[int, int] = {}
    for grant in sorted(grants, key=lambda grant: grant.order, reverse=True):
        if not grant.is_over:
            left[grant.seq] = min(max(0, grant.amount), max(0, balance))
            balance -= left[grant.seq]
    return left


def grant_of(entry: Entry, corrections: Iterable[Entry]) -> Grant:
    """The grant described by its entry and the entries that correct it."""
    grant = Grant(entry.seq, entry.request_id, entry.amount, expires_ns_of(entry))
    for correction in corrections:
        if correction.kind is Kind.EXPIRY:
            grant.is_over = True
        else:
            grant.amount += correction.amount
    return grant


def expires_ns_of(entry: Entry) -> int:
    return int(entry.details.get("expires_ns", NEVER))


def expire(work: Work, command: Expire) -> Entry | None:
    """Ends an expired grant, once. Returns None if it has not expired."""
    made = work.entry(command.tenant, command.reference, Kind.GRANT)
    if made is None:
        raise UnknownDeposit(f"tenant {command.tenant!r} has no grant {command.reference!r}")
    standing = work.entry(command.tenant, command.reference, Kind.EXPIRY)
    if standing is not None or expires_ns_of(made) > work.now_ns:
        return standing
    account = work.account(command.tenant)
    body: dict[str, object] = {"corrects": made.seq, "by": SYSTEM, "reason": "its time is over"}
    grants = [
        grant_of(entry, work.corrections.get((entry.tenant, entry.seq), ()))
        for entry in work.grants.get(command.tenant, ())
    ]
    left = remaining(grants, account.balances["granted"])[made.seq]
    postings = {"granted": -left, "promotion": left}
    return work.post(account, Kind.EXPIRY, command.reference, postings, body)


def check_not_over(grant: Grant) -> None:
    if grant.is_over:
        raise InvalidAmount(f"grant {grant.reference!r} has expired; give another one")
