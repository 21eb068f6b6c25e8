"""The cache as the wire shows it: the prefix explorer, owners of scopes, event feeds.

The cache itself is in `tiers`.
"""
