"""Eviction policies, one per file. `registry` finds them by name. Pure: see `tiers.policy.policy`.

The other decisions live here too: admission, quotas and retention. No tensors.
"""
