"""The device and host tiers: the index, the slots and frames, who owns them, and what leaves first.

The engine thread owns everything here. Nothing here reads a disk.
"""
