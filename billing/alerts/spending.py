"""What the owners that budgets watch were charged, by hour. Used by `BudgetWatch`, on its thread.

An hour is a spike if it costs more than `FACTOR` times the median of the 24 hours before it: a key
that leaked, an agent in a loop.
"""

from collections.abc import Iterator
from statistics import median_low

from billing.gate.entries import Entry, Kind
from billing.gate.periods import period_ns, period_of
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
    """A tenant's charges since an hour, by hour and watched owner.

    Other owners are not counted, since there may be a new one in every request.
    """

    def __init__(self) -> None:
        self._last_seq = 0
        self._first = 0  # the earliest hour that is complete
        self._hour = 0  # the current one
        self._wanted: frozenset[Whose] = frozenset()
        self._sums: dict[int, dict[Whose, int]] = {}

    def read(
        self,
        connection: Connection,
        tenant: str,
        now_ns: int,
        wanted: frozenset[Whose],
        *,
        month: bool,
    ) -> None:
        """Adds the charges since the last call, and forgets hours before the last day or, with
        `month`, before the current month.

        The first call, and a call with a new owner or an earlier hour, reads them all.
        """
        hour = now_ns // HOUR_NS
        first = hour - HOURS
        if month:
            first = min(first, period_ns(period_of("month", now_ns))[0] // HOUR_NS)
        if not self._sums or wanted - self._wanted or first < self._first:
            self._wanted, self._sums = wanted, {}
            self._last_seq = store_reports.first_seq(connection, tenant, first * HOUR_NS) - 1
        self._first, self._hour = first, hour
        self._sums = {each: sums for each, sums in self._sums.items() if each >= first}
        self._sums.setdefault(hour, {})
        for entry in store_reports.stream_entries(connection, tenant, after=self._last_seq):
            self._last_seq = entry.seq
            if entry.kind is Kind.CHARGE and entry.moment_ns // HOUR_NS >= first:
                self._add(entry)

    def _add(self, entry: Entry) -> None:
        sums = self._sums.setdefault(entry.moment_ns // HOUR_NS, {})
        for owner in self._wanted.intersection(whose(entry)):
            sums[owner] = sums.get(owner, 0) - entry.amount

    def within(self, owner: Whose, period: str) -> int:
        """The charges of a day or month."""
        begins, ends = (at_ns // HOUR_NS for at_ns in period_ns(period))
        return sum(sums.get(owner, 0) for hour, sums in self._sums.items() if begins <= hour < ends)

    def spike(self, owner: Whose, least: int) -> tuple[int, int, int] | None:
        """The current hour, its cost so far, and the median before it; None if it is no spike."""
        *before, spent = (
            self._sums.get(hour, {}).get(owner, 0)
            for hour in range(self._hour - HOURS, self._hour + 1)
        )
        usual = median_low(before)
        return (self._hour, spent, usual) if spent >= least and spent > FACTOR * usual else None
