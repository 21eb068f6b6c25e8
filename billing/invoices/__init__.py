"""Invoices: seller and buyers, numbers without gaps, PDF and HTML.

Issued documents never change. A month's total comes from `reports/statement`; money moves only in
`ledger`.
"""
