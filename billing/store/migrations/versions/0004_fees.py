"""Rollups count tokens kept for an hour, and the fees in an amount. Earlier charges have
neither."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    for table in ("usage_daily", "usage_sessions"):
        standing = {column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)}
        for name in ("cache_write_1h", "fees_hi", "fees_lo"):
            if name not in standing:  # 0001 creates a new database's tables in today's form
                column = sa.Column(name, sa.BigInteger, nullable=False, server_default="0")
                op.add_column(table, column)
