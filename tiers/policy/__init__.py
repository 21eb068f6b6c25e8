"""Eviction policies, one a file; `registry` finds them by name. Pure: see `tiers.policy.policy`.

Here is also what is decided beside eviction: admission, quotas and retention. No tensors.
"""
