"""Proof that the ledger is correct: named invariants, the audit trail, and re-rating of history.

Reads only.
"""
