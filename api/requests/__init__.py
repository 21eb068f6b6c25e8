"""One generation request from admission to its last byte: turns, delivery, metering, retries.

Routes call this folder; it knows no route.
"""
