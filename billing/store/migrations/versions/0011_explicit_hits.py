"""Rollups count explicit hits and writes, and minutes of pins. Earlier charges have none."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    for table in ("usage_daily", "usage_sessions"):
        standing = {column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)}
        for name in ("storage_token_minutes", "explicit_hit", "explicit_write"):
            if name not in standing:  # 0001 creates a new database's tables in today's form
                column = sa.Column(name, sa.BigInteger, nullable=False, server_default="0")
                op.add_column(table, column)
