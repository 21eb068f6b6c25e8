"""Budgets, and the messages that tell somebody outside that one is reached.

A message waits in an outbox of the ledger's database until its receiver has taken it.
"""
