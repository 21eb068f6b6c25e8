"""Makes budgets hard: the limits that the money gate checks, and what they have counted so far.

Called by `billing.alerts.budgets`, in the transaction that sets or removes the budget. That
transaction locks the account, so every hold is either counted here or checked by the gate.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from billing.errors import UnknownTenant
from billing.gate.limits import NOTHING, Spending, SpendLimit
from billing.gate.periods import period_ns, period_of
from billing.store import accounts as store_accounts
from billing.store import limits as rows
from billing.store import reports as store_reports
from billing.store.store import Connection, LedgerStore

_SAME = ("tenant", "span", "of", "value", "hard")  # unchanged, what it counted stays


class Hardening:
    """One budget that is hard, or was, while it changes. Used by one thread."""

    def __init__(
        self,
        store: LedgerStore,
        before: Mapping[Any, Any] | None,
        after: Mapping[Any, Any] | None,
        now_ns: int,
    ) -> None:
        """Reads what a new limit counts: 18 s for a million entries of its period."""
        self._store = store
        self._now_ns = now_ns
        self._past: rows.Past | None = None
        self._keeps = _alike(before, after)
        if after is not None and after["hard"] and not self._keeps:
            self._past = rows.Past(_limit(after, self.since_ns(before, after)))
            with store.reading() as connection:
                self._past.read(connection)

    def since_ns(self, before: Mapping[Any, Any] | None, after: Mapping[Any, Any]) -> int:
        """The beginning of the first period that the limit counts."""
        if before is not None and self._keeps:
            since_ns: int = before["since_ns"]
            return since_ns
        return period_ns(period_of(after["span"], self._now_ns))[0]

    def lock(self, connection: Connection, tenant: str) -> int:
        """Locks the account and tells servers of a change. Returns the number of its last entry.

        A server that learns of it stops giving holds from an advance on the tenant.
        """
        store_accounts.bump_version(self._store, connection)
        row = store_accounts.tenant_row(connection, tenant, lock=True)
        if row is None:
            raise UnknownTenant(f"tenant {tenant!r} does not exist")
        seq: int = row["seq"]
        return seq

    def stand(self, connection: Connection, name: str, tenant: str) -> None:
        """Stores what the budget counts from now on, if it is hard. The account is locked."""
        if self._past is not None:
            rows.replace_spending(connection, self._counted(connection, self._past), name)
        elif not self._keeps:
            rows.replace_spending(connection, {}, name)
        rows.mark_limited(connection, [tenant])

    def _counted(self, connection: Connection, past: rows.Past) -> rows.Rows:
        past.read(connection)
        found = {spender: Spending(charged) for spender, charged in past.charged.items()}
        for hold in store_reports.hold_list(connection, past.limit.tenant):
            body = orjson.loads(hold.body)
            spender = past.limit.spender(body, body.get("admitted_ns", 0))
            if spender is not None:
                found[spender] = found.get(spender, NOTHING).plus(0, hold.amount)
        return found


def _alike(before: Mapping[Any, Any] | None, after: Mapping[Any, Any] | None) -> bool:
    """Whether both are a hard limit of the same owners and period."""
    if before is None or after is None or not after["hard"]:
        return False
    return all(before[name] == after[name] for name in _SAME)


def _limit(row: Mapping[Any, Any], since_ns: int) -> SpendLimit:
    names = ("name", "tenant", "amount", "of", "value")
    values = {name: row[name] for name in names}
    return SpendLimit(per=row["span"], since_ns=since_ns, version=0, **values)
