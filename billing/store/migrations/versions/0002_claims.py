"""Idempotency keys record the run of the server that claimed them, so a crash frees them at
once."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    standing = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("idempotency")}
    for name in ("owner", "boot"):
        if name not in standing:  # 0001 creates a new database's tables in today's form
            column = sa.Column(name, sa.String, nullable=False, server_default="")
            op.add_column("idempotency", column)
