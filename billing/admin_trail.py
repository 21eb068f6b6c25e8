"""The admin trail of one store: who changed what, the values before and after, and why.

Every change of accounts and prices adds an entry in its own transaction. Changes elsewhere, such as
a login or a pin, are recorded separately. Any thread; every call may block.
"""

from collections.abc import Callable
from typing import Any

from billing.names import check_text
from billing.store import trail as store_trail
from billing.store.store import Connection, LedgerStore


class AdminTrail:
    """Append-only entries."""

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
        return store_trail.add_trail(
            connection,
            at_ns=self._clock_ns(),
            actor=actor,
            action=action,
            subject=subject,
            before=before,
            after=after,
            reason=reason,
        )

    def record(
        self,
        action: str,
        subject: str,
        *,
        by: str,
        after: Any = None,
        reason: str = "",
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
        with self._store.reading() as connection:
            found = store_trail.find_trail(
                connection, limit, before=before, actor=actor, action=action, text=text
            )
        return [{k: v for k, v in row.items() if k != "hash"} for row in found]

    def actions(self) -> list[str]:
        """The names of all actions in the trail."""
        with self._store.reading() as connection:
            return store_trail.trail_actions(connection)
