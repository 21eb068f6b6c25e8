"""Observations: events, lifetimes, transfer rates, misses and the working set.

Nothing here changes where a block is.
"""
