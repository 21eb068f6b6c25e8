"""Drives the serving policies over request traces, without tensors, beside the best possible order.

Used by `cachesvc replay` and by benchmarks, never by a server.
"""
