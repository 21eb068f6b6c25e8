"""How blocks move: up on a hit, down ahead of need, and the threads that do it.

What leaves and what is written is decided in `tiers.policy`.
"""
