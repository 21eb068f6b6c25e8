"""Who is in the dashboard: sessions, one-time links, and the guard against guessing.

What each person may do is `api.admin.access`.
"""
