"""What `cachesvc top` shows: the running server on one screen of a terminal.

source ─► Reading (one snapshot and its history) ─► model: rows and lines
"""
