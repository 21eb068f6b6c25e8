"""The disk tier: compressed records in LMDB shards, their writer and readers, recovery and
inspection.

Only this folder imports lmdb and zstandard. Promotion and demotion are in `tiers.transfer`.
"""
