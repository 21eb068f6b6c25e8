"""The disk tier from outside: reading, checking, exporting and rewriting its files.

For commands and the server's pages. The serving path is one folder up.
"""
