"""The device and host tiers: the index, slots and frames, their owners, and the order of eviction.

The engine thread owns everything here. Nothing here reads a disk.
"""
