"""Paged attention: the reference, and the fast paths behind the same signature.

`base` picks the path. Block tables come from `tiers.tables`.
"""
