"""Rows of budgets and of the outbox. Called by `billing.alerts`, in its transactions."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, delete, select, update
from sqlalchemy.engine import RowMapping

from billing.store.schema import budgets, outbox
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


def add_messages(store: LedgerStore, connection: Connection, rows: Iterable[Row]) -> list[str]:
    """Stores new messages and returns their ids. A continuing condition is reported only once."""
    statement = store.insert(outbox)
    made = statement.on_conflict_do_nothing().returning(outbox.c.id)
    return [found.id for row in rows if (found := connection.execute(made, row).first())]


def due_messages(connection: Connection, now_ns: int, limit: int) -> list[RowMapping]:
    query = select(outbox).where(outbox.c.delivered_ns.is_(None) & (outbox.c.next_ns <= now_ns))
    return list(connection.execute(query.order_by(outbox.c.next_ns).limit(limit)).mappings())


def change_message(connection: Connection, name: str, **values: Any) -> None:
    connection.execute(update(outbox).where(outbox.c.id == name).values(values))


def message_ids(connection: Connection, prefix: str, *, since_ns: int) -> set[str]:
    """The ids with this prefix among messages stored since."""
    begins = outbox.c.id.startswith(prefix, autoescape=True)
    query = select(outbox.c.id).where(begins & (outbox.c.at_ns >= since_ns))
    return set(connection.scalars(query))


def forget_messages(connection: Connection, before_ns: int) -> None:
    """Removes messages delivered before this time."""
    old = outbox.c.delivered_ns.is_not(None) & (outbox.c.at_ns < before_ns)
    connection.execute(delete(outbox).where(old))
