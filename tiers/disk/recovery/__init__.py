"""Checks that a shard is what LMDB wrote, and repairs it if not.

Pages are read as bytes without LMDB, because LMDB may crash on damaged ones.
"""
