"""Whether a shard is what LMDB wrote, and what to do where it is not. Knows no LMDB: its pages are
read as bytes, because LMDB may die of damaged ones.
"""
