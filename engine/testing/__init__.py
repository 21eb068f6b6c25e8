"""Small models from a seed, a runner whose KV proves its prefix, and the simulated engine.

No server imports this folder.
"""
