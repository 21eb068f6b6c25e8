"""Replays request traces through LRU tiers, without tensors.

Used by `cachesvc replay` and by benchmarks, never by a server.
"""
