"""Rows of events that a metering service refused. Called by `billing.push`."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, delete, func, select
from sqlalchemy.engine import RowMapping

from billing.store.schema import refused_events
from billing.store.store import LedgerStore

Row = dict[str, Any]


def refused_rows(connection: Connection, name: str, limit: int) -> list[RowMapping]:
    """The refused events of an export, oldest first."""
    mine = select(refused_events).where(refused_events.c.name == name)
    order = (refused_events.c.at_ns, refused_events.c.tenant, refused_events.c.seq)
    return list(connection.execute(mine.order_by(*order).limit(limit)).mappings())


def num_refused(connection: Connection, name: str | None = None) -> int:
    query = select(func.count()).select_from(refused_events)
    if name is not None:
        query = query.where(refused_events.c.name == name)
    return connection.scalar(query) or 0


def put_refused(store: LedgerStore, connection: Connection, rows: Iterable[Row]) -> None:
    """Stores refused events, each with its last reason and first instant."""
    statement = store.insert(refused_events)
    statement = statement.on_conflict_do_update(
        index_elements=["name", "event"], set_={"error": statement.excluded.error}
    )
    for row in rows:
        connection.execute(statement, row)


def drop_refused(connection: Connection, name: str, events: Iterable[str]) -> None:
    for event in events:
        mine = (refused_events.c.name == name) & (refused_events.c.event == event)
        connection.execute(delete(refused_events).where(mine))
