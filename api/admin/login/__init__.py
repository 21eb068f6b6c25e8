"""Who may enter the dashboard: passwords, sessions, and the guard against guessing.

What each person may do is `api.admin.access`.
"""
