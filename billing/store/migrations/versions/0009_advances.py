"""Servers' advances."""

from alembic import op

from billing.store.schema import advances

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    advances.create(op.get_bind(), checkfirst=True)
