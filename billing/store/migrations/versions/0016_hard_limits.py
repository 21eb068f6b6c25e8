"""Budgets that refuse requests, and what they count."""

import sqlalchemy as sa
from alembic import op

from billing.store.schema import spending

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    bind = op.get_bind()
    spending.create(bind, checkfirst=True)
    no, zero = sa.false(), "0"
    added = (  # 0001 creates a new database's tables in today's form
        ("accounts", sa.Column("limited", sa.Boolean, nullable=False, server_default=no)),
        ("holds", sa.Column("checked", sa.Text, nullable=False, server_default="")),
        ("budgets", sa.Column("hard", sa.Boolean, nullable=False, server_default=no)),
        ("budgets", sa.Column("since_ns", sa.BigInteger, nullable=False, server_default=zero)),
        ("budgets", sa.Column("version", sa.BigInteger, nullable=False, server_default=zero)),
    )
    for table, column in added:
        standing = {each["name"] for each in sa.inspect(bind).get_columns(table)}
        if column.name not in standing:
            op.add_column(table, column)
