"""What happened: events, lifetimes, transfer rates, misses and the working set.

Reads only: nothing here changes where a block is.
"""
