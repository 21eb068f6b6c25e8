"""The offline class `LLM` and its results.

The server does not use it. Both build the same engine.
"""
