"""Operators' commands on a running cache: pins, evictions, purges, quotas.

The routes and commands that call these live in `api` and `cachesvc`.
"""
