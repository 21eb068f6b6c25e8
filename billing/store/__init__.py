"""The database: schema, and every statement that reads or writes it.

Only this folder imports sqlalchemy. It decides nothing about money.
"""
