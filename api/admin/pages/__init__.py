"""The dashboard's HTML pages, their templates and static files.

JSON for scripts and commands is in `api.admin.routes`.
"""
