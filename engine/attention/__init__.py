"""Paged attention: the reference, and the fast paths with the same signature.

`engine.execution.runner` picks the path. Block tables come from `tiers.tables`.
"""
