"""Budgets, and the outbox of their alerts."""

from alembic import op

from billing.store.schema import budgets, outbox

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    for table in (budgets, outbox):
        table.create(op.get_bind(), checkfirst=True)
