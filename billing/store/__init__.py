"""The database: schema, migrations, and every statement that reads or writes it.

Only this folder imports sqlalchemy and alembic. It decides nothing about money.
"""
