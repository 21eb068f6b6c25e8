"""Rows of hard limits: what they count, and the past that a new one counts."""

from collections.abc import Iterable
from dataclasses import asdict

from sqlalchemy import Connection, Text, cast, delete, exists, func, select, update

from billing.gate.entries import Entry, Kind
from billing.gate.limits import Spender, Spending, SpendLimit
from billing.store.reports import first_seq, stream_entries
from billing.store.rows import read_entry, read_limit, read_spending, spending_row
from billing.store.schema import accounts, budgets, entries, spending
from billing.store.store import LedgerStore

Rows = dict[Spender, Spending]

DAY_NS = 86_400 * 10**9  # clocks may differ by less


def limit_rows(connection: Connection, tenant: str | None = None) -> list[SpendLimit]:
    query = select(budgets).order_by(budgets.c.name)
    if tenant is not None:
        query = query.where(budgets.c.tenant == tenant)
    return [read_limit(row) for row in connection.execute(query).mappings()]


def find_limit(connection: Connection, name: str) -> SpendLimit | None:
    row = connection.execute(select(budgets).where(budgets.c.name == name)).mappings().first()
    return None if row is None else read_limit(row)


def put_limit(store: LedgerStore, connection: Connection, limit: SpendLimit) -> None:
    values = asdict(limit)
    statement = store.insert(budgets).values(values)
    connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=values))


def drop_limit(connection: Connection, name: str) -> None:
    connection.execute(delete(budgets).where(budgets.c.name == name))


def spending_rows(connection: Connection) -> Rows:
    return dict(map(read_spending, connection.execute(select(spending)).mappings()))


def highest(connection: Connection, budget: str, period: str) -> tuple[Spender, Spending] | None:
    """Who was charged most in a period of a limit, if anybody was counted."""
    mine = (spending.c.budget == budget) & (spending.c.period == period)
    length = func.length(cast(spending.c.charged, Text))  # SQLite keeps wide numbers as text
    query = select(spending).where(mine).order_by(length.desc(), spending.c.charged.desc())
    row = connection.execute(query.limit(1)).mappings().first()
    return None if row is None else read_spending(row)


def replace_spending(connection: Connection, found: Rows, budget: str | None = None) -> None:
    mine = delete(spending)
    connection.execute(mine if budget is None else mine.where(spending.c.budget == budget))
    if made := [spending_row(*each) for each in sorted(found.items())]:
        connection.execute(spending.insert(), made)


def mark_limited(connection: Connection, tenants: Iterable[str] | None = None) -> None:
    """Notes in accounts whether they have hard limits."""
    hard = exists().where(budgets.c.tenant == accounts.c.tenant)
    change = update(accounts).values(limited=hard)
    if tenants is not None:
        change = change.where(accounts.c.tenant.in_(list(tenants)))
    connection.execute(change)


class Past:
    """What a limit's owners were charged since it counts.

    Read once before the account is locked, and once more after, so that the lock is short.
    """

    def __init__(self, limit: SpendLimit) -> None:
        self.limit = limit
        self._last_seq: int | None = None
        self.charged: dict[Spender, int] = {}

    def read(self, connection: Connection) -> None:
        """Adds the entries since the last call."""
        tenant = self.limit.tenant
        if self._last_seq is None:
            since_ns = self.limit.since_ns - DAY_NS
            self._last_seq = first_seq(connection, tenant, since_ns) - 1
        corrections: list[Entry] = []  # PostgreSQL answers nothing else while it streams
        for entry in stream_entries(connection, tenant, after=self._last_seq):
            self._last_seq = entry.seq
            if entry.kind is Kind.CHARGE:
                self._add(entry, -entry.amount)
            elif entry.kind is Kind.CORRECTION:
                corrections.append(entry)
        for entry in corrections:
            self._add(_corrected(connection, entry), -entry.amount)

    def _add(self, charge: Entry, amount: int) -> None:
        details = charge.details
        spender = self.limit.spender(details, charge.moment_ns)
        if spender is not None:
            self.charged[spender] = self.charged.get(spender, 0) + amount


def _corrected(connection: Connection, correction: Entry) -> Entry:
    """The charge that an entry corrects."""
    seq = correction.details["corrects"]
    mine = (entries.c.tenant == correction.tenant) & (entries.c.seq == seq)
    return read_entry(connection.execute(select(entries).where(mine)).mappings().one())
