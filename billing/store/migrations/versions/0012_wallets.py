"""Tenants' money in other currencies than their own."""

from alembic import op

from billing.store.schema import wallets

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    wallets.create(op.get_bind(), checkfirst=True)
