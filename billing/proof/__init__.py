"""Proof that the ledger is right: named invariants, the audit trail, and re-rating of history.

Reads only.
"""
