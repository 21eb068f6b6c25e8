"""The recent requests and why each prompt hit or missed.

The request log (one line per request) is `api.request_log`.
"""
