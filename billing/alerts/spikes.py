"""Hours that cost far more than usual: a key that leaked, an agent in a loop.

An hour is a spike if it costs more than `FACTOR` times the median of the 24 hours before it, and at
least its budget's amount. The alert is sent during the hour. Used by `BudgetWatch`, on its thread.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from statistics import median_low

from billing.gate.entries import Entry, Kind
from billing.prices.book import NS
from billing.store import reports as store_reports
from billing.store.store import Connection

FACTOR = 3
HOURS = 24  # number of hours to compare with
HOUR_NS = 3600 * NS

Whose = tuple[str, str]  # kind and value of an owner


def whose(entry: Entry) -> Iterator[Whose]:
    """Every owner for whom a charge counts."""
    details = entry.details
    yield "tenant", ""
    yield "key", details.get("key", "")
    yield "user", details.get("user", "")
    for name, value in details.get("tags", {}).items():
        yield "tag", f"{name}={value}"


class HourlySpending:
    """A tenant's charges in each of the last hours, by watched owner."""

    def __init__(self) -> None:
        self._last_seq = 0
        self._wanted: frozenset[Whose] = frozenset()
        self._hours: deque[tuple[int, dict[Whose, int]]] = deque(maxlen=HOURS + 1)

    def read(
        self, connection: Connection, tenant: str, now_ns: int, wanted: frozenset[Whose]
    ) -> None:
        """Adds the charges since the last call.

        The first call, and a call with a new owner, reads the last day's charges.
        """
        hour = now_ns // HOUR_NS
        if not self._hours or wanted - self._wanted:
            self._wanted = wanted
            self._begin(connection, tenant, hour)
        while self._hours[-1][0] < hour:
            self._hours.append((self._hours[-1][0] + 1, {}))
        self._add(store_reports.stream_entries(connection, tenant, after=self._last_seq))

    def _begin(self, connection: Connection, tenant: str, hour: int) -> None:
        first = hour - HOURS
        self._hours.clear()
        self._hours.extend((each, {}) for each in range(first, hour + 1))
        since = store_reports.first_seq(connection, tenant, first * HOUR_NS)
        self._last_seq = since - 1

    def _add(self, entries: Iterable[Entry]) -> None:
        first = self._hours[0][0]
        for entry in entries:
            self._last_seq = entry.seq
            index = entry.moment_ns // HOUR_NS - first
            if entry.kind is Kind.CHARGE and 0 <= index < len(self._hours):
                sums = self._hours[index][1]
                for name in self._wanted.intersection(whose(entry)):
                    sums[name] = sums.get(name, 0) - entry.amount

    def spike(self, name: Whose, least: int) -> tuple[int, int, int] | None:
        """The current hour, its cost so far, and the median before it; None if it is no spike."""
        *before, (hour, sums) = self._hours
        spent = sums.get(name, 0)
        usual = median_low(each.get(name, 0) for _, each in before)
        return (hour, spent, usual) if spent >= least and spent > FACTOR * usual else None
