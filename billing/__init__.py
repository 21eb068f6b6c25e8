"""Values in, ledger out: usage, prices, rating, accounts, holds and the ledger. Knows no torch and
no HTTP.
"""
