"""Top-up requests to the seller's system: one each time a balance falls too low.

A request's id is made from the ledger alone: the tenant, the budget, and the last entry after which
the balance was high enough. So every check, every server of a database and every restart request
the same top-up. The id changes only after a top-up with that id as its reference was booked and was
too small. Nothing is booked here: a receiver's answer is only a promise, and the money comes by a
deposit.
"""

from dataclasses import dataclass, field

from billing.gate.entries import Entry, Kind
from billing.gate.rollups import DAY_NS
from billing.gate.work import TenantAccount
from billing.store import alerts as rows
from billing.store import reports as store_reports
from billing.store.store import Connection


@dataclass(slots=True)
class TopUpRequests:
    """`_after` holds the balances after entries that raised them. One thread."""

    _after: dict[tuple[str, int], int] = field(default_factory=dict)

    def wanted(
        self,
        connection: Connection,
        account: TenantAccount,
        *,
        name: str,
        threshold: int,
        most: int,
        now_ns: int,
    ) -> str | None:
        """The id of the request; None if the balance suffices or the day's requests are used up."""
        if account.worth >= threshold or account.suspended:
            return None
        rare = store_reports.rare_entries(connection, account.tenant)
        prefix = f"topup/{account.tenant}/{name}/"
        crossing = f"{prefix}{self._last_above(connection, account, threshold, rare)}/"
        answered = [e for e in rare if e.kind is Kind.TOPUP and e.request_id.startswith(crossing)]
        wanted = f"{crossing}{len(answered) + 1}"
        asked = rows.message_ids(connection, prefix, since_ns=now_ns // DAY_NS * DAY_NS)
        known = rows.message_ids(connection, wanted, since_ns=0)
        return wanted if wanted in known or len(asked) < most else None

    def _last_above(
        self, connection: Connection, account: TenantAccount, threshold: int, rare: list[Entry]
    ) -> int:
        """The number of the last entry after which the balance sufficed; 0 if it never did."""
        balance, last = account.worth, account.seq
        for entry in reversed([entry for entry in rare if _moves(entry) > 0]):
            key = (account.tenant, entry.seq)
            if key not in self._after:
                between = store_reports.stream_entries(
                    connection, account.tenant, after=entry.seq, until=last
                )
                self._after[key] = balance - sum(map(_moves, between))
            balance, last = self._after[key], entry.seq
            if balance >= threshold:
                return entry.seq
        return 0


def _moves(entry: Entry) -> int:
    """An entry's effect on the balance that may be spent on everything."""
    return entry.amount - entry.amounts.get("scoped", 0)
