"""Entries record the day and month they are billed in. Earlier entries keep their date."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    standing = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("entries")}
    if "billed_ns" in standing:  # 0001 creates a new database's tables in today's form
        return
    op.add_column("entries", sa.Column("billed_ns", sa.BigInteger))
    named = sa.text("billed_ns IS NOT NULL")
    op.create_index(
        "entries_billed",
        "entries",
        ["tenant", "billed_ns"],
        sqlite_where=named,
        postgresql_where=named,
    )
