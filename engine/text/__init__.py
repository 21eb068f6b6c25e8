"""Token ids to text and back, and chat templates.

The engine itself handles token ids only; `api` and the offline class call this folder.
"""
