"""The disk tier from outside: looking into it, checking, exporting, rewriting its files.

For commands and for the server's own pages. What serves requests lives one folder up.
"""
