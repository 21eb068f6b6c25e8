"""Reports the server's state to systemd, if that supervises it (`Type=notify`).

The protocol is sd_notify(3): a datagram to the socket named in the environment.
"""

import contextlib
import socket

from cachesvc.config.places import notify_socket


def notify(state: str) -> None:
    """Sends `READY=1`, `STOPPING=1` or `STATUS=...`. Does nothing without a supervisor."""
    address = notify_socket()
    if address is None:
        return
    with (
        contextlib.suppress(OSError),  # a lost notification must not stop the server
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to,
    ):
        to.connect(address)
        to.sendall(state.encode())
