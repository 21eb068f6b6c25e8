"""The first schema. Later revisions change tables step by step and never touch written entries."""

from alembic import op

from billing.store.schema import append_only_statements, metadata

revision = "0001"
down_revision = None


def upgrade() -> None:
    bind = op.get_bind()
    metadata.create_all(bind)
    for statement in append_only_statements(bind.dialect.name):
        op.execute(statement)
