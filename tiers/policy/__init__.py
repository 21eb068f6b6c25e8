"""The rules of the tiers: the order of eviction, admission, quotas and retention.

Pure: no tensors, threads or clocks.
"""
