"""Commands about tenants, keys, balances, prices, usage and the ledger.

The operations themselves are in `billing`.
"""
