"""The admin trail of one store: who changed what, the values before and after, and why.

Changes of accounts and prices are added in their own transactions, decisions about money by the
store. Changes elsewhere, such as a login or a pin, are recorded separately.
"""

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, select

from billing.names import check_text
from billing.store.schema import trail
from billing.store.store import LedgerStore
from billing.store.trail import add_trail


class AdminTrail:
    """The trail of one store. Any thread; every call may block."""

    def __init__(self, store: LedgerStore, clock_ns: Callable[[], int]) -> None:
        self._store = store
        self._clock_ns = clock_ns

    def add(
        self,
        connection: Connection,
        actor: str,
        action: str,
        subject: str,
        before: Any,
        after: Any,
        reason: str,
    ) -> int:
        """Adds an entry in the transaction of the change it describes. Returns its number."""
        check_text(reason, "reason")
        said = {"actor": actor, "action": action, "subject": subject, "reason": reason}
        return add_trail(connection, at_ns=self._clock_ns(), before=before, after=after, **said)

    def record(
        self, action: str, subject: str, *, by: str, after: Any = None, reason: str = ""
    ) -> None:
        """Adds an entry for a change made elsewhere: a login, a pin, an eviction."""
        self._store.retrying(
            lambda connection: self.add(connection, by, action, subject, None, after, reason)
        )

    def newest(
        self,
        limit: int = 100,
        *,
        before: int | None = None,
        actor: str = "",
        action: str = "",
        text: str = "",
    ) -> list[dict[str, Any]]:
        """Admin changes, newest first: at_ns, actor, action, subject, before, after, reason.

        Filters: older than number `before`, by actor, by action, and `text` in subject or reason.
        """
        query = select(trail).order_by(trail.c.seq.desc()).limit(limit)
        if before is not None:
            query = query.where(trail.c.seq < before)
        if actor:
            query = query.where(trail.c.actor == actor)
        if action:
            query = query.where(trail.c.action == action)
        if text:
            named = trail.c.subject.contains(text, autoescape=True)
            query = query.where(named | trail.c.reason.contains(text, autoescape=True))
        with self._store.reading() as connection:
            found = connection.execute(query).mappings().all()
        return [{k: v for k, v in row.items() if k != "hash"} for row in found]

    def actions(self) -> list[str]:
        """The names of all actions in the trail."""
        found = select(trail.c.action).distinct().order_by(trail.c.action)
        with self._store.reading() as connection:
            return list(connection.scalars(found))
