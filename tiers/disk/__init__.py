"""The disk tier: compressed records in LMDB shards, their writer and readers, recovery and
inspection.

Only this folder knows lmdb and zstandard. What moves blocks up and down is in `tiers.transfer`.
"""
