"""Tiers, storage faults and seeded workloads for tests and simulations.

No server imports this folder.
"""
