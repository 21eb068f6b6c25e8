"""Runs migrations on the connection that `billing.store.opening` hands over, in its transaction."""

from alembic import context

from billing.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
