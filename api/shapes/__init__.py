"""The shapes of requests and answers on the wire.

Pure: no route, no engine, no money.
"""
