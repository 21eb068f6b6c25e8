"""Invoices; and rollups count the granted and the owed part of an amount."""

import sqlalchemy as sa
from alembic import op

from billing.gate.rollups import rollups
from billing.store.reports import stream_entries
from billing.store.schema import (
    INVOICE_TABLES,
    append_only_statements,
    metadata,
    usage_daily,
    usage_sessions,
)

revision = "0006"
down_revision = "0005"

NEW = ("granted_hi", "granted_lo", "owed_hi", "owed_lo")


def upgrade() -> None:
    bind = op.get_bind()
    if sa.inspect(bind).has_table("invoices"):  # 0001 creates a new database in today's form
        return
    for table in (usage_daily, usage_sessions):
        for name in NEW:
            column = sa.Column(name, sa.BigInteger, nullable=False, server_default="0")
            op.add_column(table.name, column)
    _sum_again(bind)
    for name in INVOICE_TABLES:
        metadata.tables[name].create(bind)
    for statement in append_only_statements(bind.dialect.name, INVOICE_TABLES):
        op.execute(statement)


def _sum_again(bind: sa.Connection) -> None:
    """Recomputes the rollups, without columns of later revisions, which earlier entries lack."""
    daily, sessions = rollups(stream_entries(bind)).stored()
    for table, rows in ((usage_daily, daily), (usage_sessions, sessions)):
        standing = [column["name"] for column in sa.inspect(bind).get_columns(table.name)]
        bind.execute(sa.delete(table))
        for row in rows:
            bind.execute(sa.insert(table).values({name: row[name] for name in standing}))
