"""Metrics, history and snapshots of a running server.

Only this folder knows prometheus_client, zmq and msgspec.
"""
