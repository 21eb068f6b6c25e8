"""A client's connection, bounded while its request arrives: in bytes of its head, and in time.

uvicorn keeps headers of any length and waits for the rest of a request for ever, so whoever reaches
the port, with a key or without, could fill the memory or hold every connection. Event loop only.
"""

import asyncio
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 64 << 10  # of a request line and its headers; proxies allow 8 to 32 KiB
HEAD_S: Final = 20.0  # for a head to arrive, from its connection's beginning or its first byte
BODY_S: Final = 60.0  # without a byte of a body that is still to come


class BoundedConnection(HttpToolsProtocol):
    """Invariant: while a request is on its way, a timer runs that ends the connection."""

    max_head_bytes = MAX_HEAD_BYTES
    head_s = HEAD_S
    body_s = BODY_S

    _patience: asyncio.TimerHandle | None = None
    _in_head = True
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for(self.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._in_head and self._patience is not None:
            self._wait_for(self.body_s)
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self.send_400_response(f"Headers exceed {self.max_head_bytes} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._wait_for(self.head_s)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._wait_for(self.body_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._wait_for(None)
        super().on_message_complete()

    def _wait_for(self, seconds: float | None) -> None:
        """End the connection after so long; None waits without end, as for an answer."""
        if self._patience is not None:
            self._patience.cancel()
        self._patience = None
        if seconds is not None:
            self._patience = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.send_400_response("The request did not arrive in time.")
