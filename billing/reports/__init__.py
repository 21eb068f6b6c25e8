"""What people take away: usage, invoices, revenue, receipts and exports.

Reads only; amounts come from the ledger.
"""
