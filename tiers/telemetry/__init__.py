"""Observations: events, lifetimes, transfer rates, and misses.

Nothing here changes where a block is.
"""
