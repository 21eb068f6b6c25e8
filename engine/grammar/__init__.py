"""Structured output: grammars compiled in a child process and matched token by token.

Only this folder knows xgrammar.
"""
