"""Scoped grants, for some prices only, and what is left of each."""

import sqlalchemy as sa
from alembic import op

from billing.store.schema import Wide, scoped_grants

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    scoped_grants.create(op.get_bind(), checkfirst=True)
    standing = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("accounts")}
    if "scoped" not in standing:  # 0001 creates a new database's tables in today's form
        column = sa.Column("scoped", Wide, nullable=False, server_default="0")
        op.add_column("accounts", column)
