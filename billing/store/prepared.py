"""Statements of the hot path: built with SQLAlchemy Core, compiled once, run on the driver's
cursor.

Core takes about 50 us per execution and the database 5, and a hold with its settlement runs a
dozen. The compiled SQL is the same and runs in the same transaction. Errors are the driver's own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, select, update

from billing.gate.commands import Key
from billing.gate.entries import ACCOUNTS
from billing.gate.rollups import COUNTERS, DAILY_KEY, SESSION_KEY
from billing.store.dialects import driver_dialect, insert_into
from billing.store.schema import (
    Wide,
    accounts,
    budgets,
    entries,
    holds,
    spending,
    usage_daily,
    usage_sessions,
)


class Prepared:
    """One compiled statement. `dialect` is `sqlite` or `postgresql`."""

    def __init__(self, statement: Any, dialect: str) -> None:
        compiled = statement.compile(dialect=driver_dialect(dialect))
        self.sql = str(compiled)
        self.names: tuple[str, ...] = tuple(compiled.positiontup or ())
        self._columns = tuple(getattr(statement, "selected_columns", {}).keys())
        self._values = _reader(self.names)
        self._wide = [
            place
            for place, name in enumerate(self.names)
            if isinstance(compiled.binds[name].type, Wide)
        ]

    def run(self, connection: Connection, rows: Iterable[Mapping[str, Any]]) -> None:
        cursor = connection.connection.cursor()
        try:
            for row in rows:
                self.execute(cursor, row)
        finally:
            cursor.close()

    def find(self, connection: Connection, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows found, by column, with wide numbers as the driver returns them."""
        cursor = connection.connection.cursor()
        try:
            self.execute(cursor, values)
            return [dict(zip(self._columns, row, strict=True)) for row in cursor.fetchall()]
        finally:
            cursor.close()

    def execute(self, cursor: Any, row: Mapping[str, Any]) -> None:
        values = self._values(row)
        if self._wide:
            texts = list(values)
            for place in self._wide:
                texts[place] = str(texts[place])
            values = tuple(texts)
        cursor.execute(self.sql, values)


def _reader(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """A function that returns the named values of a row, in order."""
    if len(names) == 1:  # itemgetter would return the bare value
        return lambda row: (row[names[0]],)
    return itemgetter(*names) if names else lambda row: ()


class Finder:
    """A select by a list of names, optionally of one tenant, compiled for 1, 2, 4, 8, ... names.

    Pairs of (tenant, request id) are queried tenant by tenant, because SQLite would scan the table
    for a long list of pairs.
    """

    def __init__(self, make: Callable[[Sequence[Any]], Any], dialect: str) -> None:
        self._make, self._dialect = make, dialect
        self._by_size: dict[int, Prepared] = {}

    def __call__(
        self, connection: Connection, names: Sequence[str], **fixed: str
    ) -> list[dict[str, Any]]:
        size = 1 << (len(names) - 1).bit_length()
        padded = [*names, *([names[-1]] * (size - len(names)))]
        values = {f"k{i}": name for i, name in enumerate(padded)}
        return self.prepared(size).find(connection, values | fixed)

    def prepared(self, size: int) -> Prepared:
        """The statement for `size` names."""
        found = self._by_size.get(size)
        if found is None:
            statement = self._make([bindparam(f"k{i}") for i in range(size)])
            found = self._by_size[size] = Prepared(statement, self._dialect)
        return found

    def by_tenant(self, connection: Connection, keys: Iterable[Key]) -> list[dict[str, Any]]:
        """The rows of these (tenant, request id) pairs."""
        names: dict[str, list[str]] = {}
        for tenant, request_id in keys:
            names.setdefault(tenant, []).append(request_id)
        return [
            row
            for tenant, requests in names.items()
            for row in self(connection, requests, of_tenant=tenant)
        ]


class HotStatements:
    """Every statement that a batch of commands may run."""

    def __init__(self, dialect: str) -> None:
        self.find_accounts = Finder(_accounts_for_update, dialect)
        self.find_holds = Finder(lambda keys: _by_request(holds, keys), dialect)
        self.find_entries = Finder(lambda keys: _by_request(entries, keys), dialect)
        self.add_entries = Prepared(entries.insert(), dialect)
        holding = _replacing(dialect, holds, ("tenant", "request_id"))
        self.put_holds = Prepared(holding, dialect)
        self.drop_holds = Prepared(_DROP_HOLD, dialect)
        self.find_limits = Finder(
            lambda keys: select(budgets).where(budgets.c.tenant.in_(keys)), dialect
        )
        self.find_spending = Finder(_spending_of, dialect)
        spender = ("budget", "period", "value")
        self.put_spending = Prepared(_replacing(dialect, spending, spender), dialect)
        self.drop_spending = Prepared(_DROP_SPENDING, dialect)
        self.move_accounts = Prepared(_MOVE_ACCOUNT, dialect)
        self.add_daily = Prepared(_adding(dialect, usage_daily, DAILY_KEY), dialect)
        sessions = _adding(dialect, usage_sessions, SESSION_KEY, last="last_ns")
        self.add_sessions = Prepared(sessions, dialect)


def _accounts_for_update(keys: Sequence[Any]) -> Any:
    """Locks accounts in the order of their names, to avoid deadlocks."""
    query = select(accounts).where(accounts.c.tenant.in_(keys))
    return query.order_by(accounts.c.tenant).with_for_update()


def _by_request(table: Any, keys: Sequence[Any]) -> Any:
    ours = table.c.tenant == bindparam("of_tenant")
    return select(table).where(ours & table.c.request_id.in_(keys))


def _spending_of(keys: Sequence[Any]) -> Any:
    ours = (spending.c.budget == bindparam("of_budget")) & (
        spending.c.period == bindparam("of_period")
    )
    return select(spending).where(ours & spending.c.value.in_(keys))


_DROP_HOLD = delete(holds).where(
    (holds.c.tenant == bindparam("tenant")) & (holds.c.request_id == bindparam("request_id"))
)
_DROP_SPENDING = delete(spending).where(
    (spending.c.budget == bindparam("budget"))
    & (spending.c.period == bindparam("period"))
    & (spending.c.value == bindparam("value"))
)
_MOVE_ACCOUNT = (
    update(accounts)
    .where(accounts.c.tenant == bindparam("of_tenant"))
    .values({name: bindparam(name) for name in (*ACCOUNTS, "held", "seq", "at_ns", "head")})
)


def _adding(dialect: str, table: Any, key: Sequence[str], last: str = "") -> Any:
    """An upsert that adds a rollup row's counters to the stored ones."""
    statement = insert_into(table, dialect)
    new = statement.excluded
    changes: dict[str, Any] = {name: table.c[name] + new[name] for name in COUNTERS}
    if last:
        later = func.greatest if dialect == "postgresql" else func.max
        changes[last] = later(table.c[last], new[last])
    return statement.on_conflict_do_update(index_elements=list(key), set_=changes)


def _replacing(dialect: str, table: Any, key: Sequence[str]) -> Any:
    statement = insert_into(table, dialect)
    changes = {c.name: statement.excluded[c.name] for c in table.c if c.name not in key}
    return statement.on_conflict_do_update(index_elements=list(key), set_=changes)
