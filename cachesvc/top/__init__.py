"""What `cachesvc top` shows: the running server on one screen of a terminal.

source ─► Reading (one snapshot, its history, its tenants) ─► model: rows and lines
"""
