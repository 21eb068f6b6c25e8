"""Events that a metering service refused."""

from alembic import op

from billing.store.schema import refused_events

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    refused_events.create(op.get_bind(), checkfirst=True)
