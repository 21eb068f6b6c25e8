"""The cache as the wire shows it: the prefix explorer, owners of scopes.

The cache itself is in `tiers`.
"""
