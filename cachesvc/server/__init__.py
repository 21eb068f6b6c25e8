"""The running server's parts: model and engine, money, dashboard, HTTP, and the server file.

`cachesvc.service` joins them.
"""
