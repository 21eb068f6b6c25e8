"""Tells systemd how far the server is, where it supervises it (`Type=notify`).

The protocol of sd_notify(3): a datagram to the socket that the environment names.
"""

import contextlib
import socket

from cachesvc.config.places import notify_socket


def notify(state: str) -> None:
    """Say `READY=1`, `STOPPING=1` or `STATUS=...`; does nothing without a supervisor."""
    address = notify_socket()
    if address is None:
        return
    with (
        contextlib.suppress(OSError),  # its loss is no reason to stop serving
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to,
    ):
        to.connect(address)
        to.sendall(state.encode())
