"""What SQLite and PostgreSQL have and SQLAlchemy's Core does not: inserts that know of conflicts.

PostgreSQL's dialect is imported where a database is one, since it costs 60 ms of every command.
"""

from typing import Any

from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.sqlite import pysqlite

POSTGRESQL = "postgresql"


def insert_into(table: Any, dialect: str) -> Any:
    """An INSERT with `on_conflict_do_nothing` and `on_conflict_do_update`."""
    if dialect == POSTGRESQL:
        from sqlalchemy.dialects import postgresql

        return postgresql.insert(table)
    return sqlite.insert(table)


def driver_dialect(dialect: str) -> Any:
    """What compiles statements for the driver's own cursor."""
    if dialect == POSTGRESQL:
        from sqlalchemy.dialects.postgresql import psycopg

        make: Any = psycopg.dialect
        return make(paramstyle="format")
    return pysqlite.dialect(paramstyle="qmark")
