"""Invoices that can be sent: who they are from and to, numbers without a gap, PDF and HTML.

Issued documents never change. What a month comes to is in `reports/statement`; money moves in
`ledger` alone.
"""
