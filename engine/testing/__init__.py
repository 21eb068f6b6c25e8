"""Small seeded models, a runner whose KV proves its prefix, and the simulated engine.

No server imports this folder.
"""
