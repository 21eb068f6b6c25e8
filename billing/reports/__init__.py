"""Reports: usage, statements, revenue, receipts and exports.

Reads only; amounts come from the ledger.
"""
