"""Checks from outside that a server's cache never changes an answer.

Asks any OpenAI-compatible server over HTTP and compares. Nothing here knows an engine or its tiers.
"""
