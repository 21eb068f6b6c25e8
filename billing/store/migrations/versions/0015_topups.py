"""A budget's top-up request for a low balance, and its daily maximum."""

import sqlalchemy as sa
from alembic import op

from billing.store.schema import Wide

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    standing = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("budgets")}
    if "ask" not in standing:  # 0001 creates a new database's tables in today's form
        op.add_column("budgets", sa.Column("ask", Wide, nullable=False, server_default="0"))
        op.add_column("budgets", sa.Column("most", sa.Integer, nullable=False, server_default="0"))
