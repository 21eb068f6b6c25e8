"""Moves blocks: up on a hit, down ahead of need, with the threads that do it.

`tiers.policy` decides what leaves and what is written.
"""
