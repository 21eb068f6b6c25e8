"""Structured output: compiles grammars in a child process and matches them token by token.

Only this folder uses xgrammar.
"""
