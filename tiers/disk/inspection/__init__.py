"""The disk tier from outside: reading, checking, exporting and rewriting its files.

For commands and for the server's own pages. What serves requests lives one folder up.
"""
