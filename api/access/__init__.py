"""Who asks and how much they may: keys, local pages, limits, concurrency, body size.

No money: balances are checked by the money gate.
"""
