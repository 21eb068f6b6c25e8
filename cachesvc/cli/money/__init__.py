"""Commands about tenants, keys, balances, prices, usage and the ledger.

What they call is in `billing`.
"""
