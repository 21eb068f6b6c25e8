"""The compute half of a server whose requests pass to an endpoint of their own protocol.

What passes, and how, is in `api.relay`. No model is here, no token and no block.
"""
