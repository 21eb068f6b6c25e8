"""Metrics, traces, history and snapshots of a running server.

Only this folder knows prometheus_client, opentelemetry, zmq and msgspec.
"""
