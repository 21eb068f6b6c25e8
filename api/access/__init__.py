"""Who the caller is, and its limits: keys, local pages, rates, concurrency, body size.

No money: balances are checked by the money gate.
"""
