"""Grants that expire."""

from alembic import op

from billing.store.schema import expiring

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    expiring.create(op.get_bind(), checkfirst=True)
