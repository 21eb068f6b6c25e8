"""Checks that a shard is what LMDB wrote, and repairs it if not. Knows no LMDB: its pages are
read as bytes, because LMDB may die of damaged ones.
"""
