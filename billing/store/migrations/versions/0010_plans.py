"""Included tokens, and their worth in each rollup."""

import sqlalchemy as sa
from alembic import op

from billing.store.schema import included_used

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    included_used.create(op.get_bind(), checkfirst=True)
    for table in ("usage_daily", "usage_sessions"):
        standing = {column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)}
        for name in ("included_hi", "included_lo"):
            if name not in standing:  # 0001 creates a new database's tables in today's form
                column = sa.Column(name, sa.BigInteger, nullable=False, server_default="0")
                op.add_column(table, column)
