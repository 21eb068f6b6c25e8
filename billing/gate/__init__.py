"""The money gate: holds before work, settlement after it, and the entries they become.

What is durable is in `billing.store`.
"""
