"""The serving policies driven over request traces, without tensors, beside the best possible order.

Used by `cachesvc replay` and by benches; never by a server.
"""
