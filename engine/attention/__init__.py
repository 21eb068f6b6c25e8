"""Paged attention: the reference, and the fast paths with the same signature.

`base` picks the path. Block tables come from `tiers.tables`.
"""
