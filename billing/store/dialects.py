"""Inserts with conflict handling, which SQLite and PostgreSQL have and SQLAlchemy Core lacks.

PostgreSQL's dialect is imported only for such a database, because the import takes 60 ms.
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
    """The dialect that compiles statements for the driver's own cursor."""
    if dialect == POSTGRESQL:
        from sqlalchemy.dialects.postgresql import psycopg

        make: Any = psycopg.dialect
        return make(paramstyle="format")
    return pysqlite.dialect(paramstyle="qmark")
