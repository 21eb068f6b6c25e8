"""Rows of budgets. Called by `billing.budgets`, in its transactions."""

from typing import Any

from sqlalchemy import Connection, delete, select
from sqlalchemy.engine import RowMapping

from billing.store.schema import budgets
from billing.store.store import LedgerStore

Row = dict[str, Any]


def put_budget(store: LedgerStore, connection: Connection, values: Row) -> None:
    statement = store.insert(budgets).values(values)
    rest = {name: value for name, value in values.items() if name != "name"}
    connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=rest))


def find_budget(connection: Connection, name: str) -> RowMapping | None:
    return connection.execute(select(budgets).where(budgets.c.name == name)).mappings().first()


def drop_budget(connection: Connection, name: str) -> None:
    connection.execute(delete(budgets).where(budgets.c.name == name))


def budget_rows(connection: Connection) -> list[RowMapping]:
    return list(connection.execute(select(budgets).order_by(budgets.c.name)).mappings())
