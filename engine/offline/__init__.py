"""The offline class `LLM` and what it returns.

The server does not use it; both build the same engine.
"""
