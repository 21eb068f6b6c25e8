"""Converts token ids to text and back, and renders chat templates.

The engine itself handles only token ids. `api` calls this folder.
"""
