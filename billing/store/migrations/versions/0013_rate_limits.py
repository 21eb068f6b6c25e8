"""Limits of a tenant set by an admin, which override the settings."""

from alembic import op

from billing.store.schema import rate_limits

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    rate_limits.create(op.get_bind(), checkfirst=True)
