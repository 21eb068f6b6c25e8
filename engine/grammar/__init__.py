"""Structured output: compiles grammars and matches them token by token, in bounded steps.

Only this folder uses llguidance.
"""
