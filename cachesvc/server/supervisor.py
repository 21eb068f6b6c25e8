"""What supervises the server: the signals that end it, and systemd, which hears its state.

The protocol is sd_notify(3): a datagram to the socket named in the environment (`Type=notify`).
"""

import contextlib
import signal
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


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those that end a server after it has saved what it holds: a closed terminal's too, unless it
    was told to outlive it (`nohup`)."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *(() if ignored else (signal.SIGHUP,)))
