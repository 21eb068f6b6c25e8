"""Bounds on clients' connections: bytes and time of an arriving request, and their number.

uvicorn accepts headers and trailers of any length, queues any number of pipelined requests, waits
forever for the rest of a request, and accepts connections until the process runs out of
descriptors. All of this happens before a key is checked, so anyone who reaches the port could fill
the memory or hold every connection. Event loop only.
"""

import asyncio
import resource
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

MAX_HEAD_BYTES: Final = 64 << 10  # of a request line and its headers; proxies allow 8 to 32 KiB
MAX_PIPELINED: Final = 32  # requests of one connection that wait for earlier answers
MAX_UNREAD_BYTES: Final = 1 << 20  # of a body that nobody reads while its request is answered
HEAD_S: Final = 20.0  # for a head to arrive, from the connection's start or the head's first byte
BODY_S: Final = 60.0  # without a byte of an unfinished body
WRITE_S: Final = 120.0  # without room for a byte of an answer, because the client does not read
KEEP_ALIVE_S: Final = 75  # between requests; proxies and clients close theirs after 60 s or less
BODY_BYTES_PER_S: Final = 1024  # minimum rate of a body after BODY_S
MAX_CONNECTIONS: Final = 4096  # open at once; with unfinished heads and bodies, 256 MiB
DESCRIPTORS: Final = 3 / 4  # share of the process's descriptors for connections
CLOSED_AT_ONCE: Final = 1 / 16  # of the bound, so that a flood pays for few looks at all of them


def connection_bound() -> int:
    """The maximum of open connections. The ledger and the disk tier need descriptors too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(1, int(soft * DESCRIPTORS)))


def http_config(app: Callable[..., Any], **options: Any) -> uvicorn.Config:
    """Bounded connections and our own logs."""
    return uvicorn.Config(
        app,
        http=BoundedConnection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        **options,
    )


class _HeadsJoined:
    """A transport that writes the head of an answer together with its first bytes.

    uvicorn writes them one after the other in one turn of the loop. Each write is a system call and
    wakes the client. A head that nothing follows is written at the end of the turn.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        head, self._head = self._head, b""
        if data.startswith(b"HTTP/1.1 ") and not head:
            self._head = data
            self._loop.call_soon(self._end_turn)
        else:
            self._transport.write(head + data)

    def close(self) -> None:
        self._end_turn()
        self._transport.close()

    def _end_turn(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)


class BoundedConnection(HttpToolsProtocol):
    """Invariant: while the rest of a request is awaited, a timer runs that ends the connection.

    At the limit, a new connection closes those that have waited longest for a request, first those
    of an address with more than half of all. A connection whose request is being answered stays. If
    all are being answered, the new one gets a 503.

    `_framing` counts raw bytes without body data since the last progress: the end of a head, a
    piece of a body, or the end of a message. The parser gets no more of them than the bound, so a
    head, a chunk's extensions and the trailers all stay below it.
    """

    max_head_bytes = MAX_HEAD_BYTES
    max_unread_bytes = MAX_UNREAD_BYTES
    head_s = HEAD_S
    body_s = BODY_S
    write_s = WRITE_S
    body_bytes_per_s = BODY_BYTES_PER_S
    max_connections = connection_bound()

    _waiting_since_s = 0.0  # for its next request, or for the rest of one
    _stuck: asyncio.TimerHandle | None = None
    _patience: asyncio.TimerHandle | None = None
    _in_head = True
    _arrives = False  # a request has begun and not ended
    _framing = 0
    _progressed = False
    _body_bytes = 0
    _body_began_s = 0.0
    _unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_HeadsJoined(transport, self.loop))  # type: ignore[arg-type]
        self._waiting_since_s = self.loop.time()
        self._wait_for(self.head_s)
        if len(self.connections) > self.max_connections and not self._close_longest_waiting():
            self.connections.discard(self)
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "Too many connections; try again soon.")

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for(None)
        self._end_stuck()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._waiting_since_s = self.loop.time()
        super().on_response_complete()

    @property
    def _is_waiting(self) -> bool:
        """Whether no complete request has arrived, so none is being answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return self._patience is not None or cycle is None or cycle.response_complete

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _close_longest_waiting(self) -> bool:
        """Closes other waiting connections, longest first. Returns False if there is none."""
        others = [c for c in self.connections if c is not self and isinstance(c, type(self))]
        waiting = [other for other in others if other._is_waiting]
        address, num_open = Counter(other._address for other in others).most_common(1)[0]
        if 2 * num_open > len(others):
            waiting = [other for other in waiting if other._address == address] or waiting
        waiting.sort(key=lambda other: other._waiting_since_s)
        closed = waiting[: max(1, int(self.max_connections * CLOSED_AT_ONCE))]
        for other in closed:
            self.connections.discard(other)
            other.transport.close()
        return bool(closed)

    def pause_writing(self) -> None:
        """Cuts off a client that does not read within WRITE_S, as closing would wait for it."""
        super().pause_writing()
        self._end_stuck()
        self._stuck = self.loop.call_later(self.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_stuck()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            room = self.max_head_bytes - self._framing
            if room <= 0:
                self._refuse_framing()
                return
            self._feed(data[:room])
            data = data[room:]
        self._renew_patience()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._arrives = True, True
        self._wait_for(None)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Ignores trailers, which uvicorn would add to the already checked headers."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._progressed = False, True
        self._body_bytes, self._unread_bytes = 0, 0
        self._body_began_s = self.loop.time()
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        self._progressed = True
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._unread_bytes += len(body)
            if self._unread_bytes > self.max_unread_bytes:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._progressed, self._arrives = True, False
        self._wait_for(None)
        super().on_message_complete()

    def _feed(self, part: bytes) -> None:
        self._progressed = False
        super().data_received(part)
        self._framing = 0 if self._progressed else self._framing + len(part)

    def _renew_patience(self) -> None:
        """Starts the timer if more is to come. Extends it after a byte of a body, unless the whole
        body is too slow."""
        if self._in_head or not self._arrives:
            if self._arrives and self._patience is None:
                self._wait_for(self.head_s)
            return
        allowed_s = self.body_s + self._body_bytes / self.body_bytes_per_s
        left_s = self._body_began_s + allowed_s - self.loop.time()
        self._wait_for(min(self.body_s, max(0.0, left_s)))

    def _wait_for(self, seconds: float | None) -> None:
        """Ends the connection after this time; None waits forever, as for an answer."""
        if self._patience is not None:
            self._patience.cancel()
        self._patience = None
        if seconds is not None:
            self._patience = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "The request did not arrive in time.")

    def _end_stuck(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
        self._stuck = None

    def _refuse_framing(self) -> None:
        status, what = HTTPStatus.BAD_REQUEST, "Trailers or chunk sizes"
        if self._in_head:
            status, what = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "Headers"
        self._refuse(status, f"{what} exceed {self.max_head_bytes} bytes.")

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Sends the reason and ends the connection; in the middle of an answer only ends it."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or not cycle.response_started or cycle.response_complete:
            head = f"content-type: text/plain\r\ncontent-length: {len(message)}\r\n"
            answer = f"{head}connection: close\r\n\r\n{message}"
            self.transport.write(STATUS_LINE[status] + answer.encode())
        self.transport.close()
