"""Operators' changes to a running server's cache: purges, quotas, scopes and storage charges.

Commands are in `cachesvc.cli`, routes in `api.admin`.
"""
