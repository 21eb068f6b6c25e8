"""The running server's parts: model and engine, money, dashboard, HTTP, and the file that finds it.

`cachesvc.service` joins them.
"""
