"""Budgets, and the messages to external receivers when one is reached.

A message waits in an outbox in the ledger's database until its receiver has accepted it.
"""
