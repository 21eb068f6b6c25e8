"""One HTTP request to an external receiver, which may be down, slow or hostile.

The whole exchange takes at most `timeout_s`, however slowly the answer comes, and at most
`most_bytes` of the answer are read. Redirects are not followed: a POST would become a GET without
its body, whose success means nothing, and the key would go to an unknown address. Blocks.
"""

import http.client
import os
import socket
import threading
import urllib.request
from dataclasses import dataclass
from email.message import Message
from functools import partial
from typing import Any

from billing.errors import ReceiverError

LONGEST_REASON = 200  # characters of its message


@dataclass(frozen=True, slots=True)
class ReceiverReply:
    """An answer of any status, with the beginning of its body."""

    status: int
    reason: str
    headers: Message
    body: bytes

    @property
    def refusal(self) -> str:
        """Why it is not a success; empty if it is."""
        if 200 <= self.status < 300:
            return ""
        reason = f"HTTP {self.status} {self.reason}"[:LONGEST_REASON]
        where = self.headers.get("location")
        if self.redirects and where:
            return (
                f"{reason}: redirects are not followed; set the address {where[:LONGEST_REASON]!r}"
            )
        return reason

    @property
    def redirects(self) -> bool:
        return 300 <= self.status < 400


def send(request: urllib.request.Request, *, timeout_s: float, most_bytes: int) -> bytes:
    """The beginning of the answer. Raises `ReceiverError` for a refusal or no answer."""
    reply = ask(request, silence_s=timeout_s, timeout_s=timeout_s, most_bytes=most_bytes)
    if reply.refusal:
        raise ReceiverError(reply.refusal)
    return reply.body


def ask(
    request: urllib.request.Request, *, silence_s: float, timeout_s: float, most_bytes: int
) -> ReceiverReply:
    """The answer, including a refusal.

    Raises `ReceiverError` without an answer: nothing for `silence_s`, or not all of it in
    `timeout_s`.
    """
    with _Deadline(timeout_s) as deadline:
        opener = urllib.request.build_opener(_AsAnswered, _Web(deadline))
        try:
            with opener.open(request, timeout=silence_s) as answer:
                body: bytes = answer.read(most_bytes)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = (str(error) or type(error).__name__)[:LONGEST_REASON]
            raise ReceiverError(deadline.said or reason) from error
        if deadline.said:  # the part read before it is not the whole answer
            raise ReceiverError(deadline.said)
        return ReceiverReply(answer.status, answer.reason, answer.headers, body)


class _AsAnswered(urllib.request.HTTPErrorProcessor):
    """Stops urllib from handling errors and redirects, since it would resend keys to the new
    address."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


class _Deadline:
    """Ends a connection at its deadline, because a socket's own timeout restarts at each byte."""

    def __init__(self, timeout_s: float) -> None:
        self.said = ""  # set once it has passed
        self._timeout_s = timeout_s
        self._timer = threading.Timer(timeout_s, self._end)
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []

    def __enter__(self) -> "_Deadline":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            for end in self._ends:
                end.close()

    def follow(self, connection: socket.socket) -> None:
        """Watches a connection through its own descriptor, since TLS and responses detach the
        socket's."""
        with self._lock:
            self._ends.append(socket.socket(fileno=os.dup(connection.fileno())))
        if self.said:
            raise TimeoutError(self.said)

    def _end(self) -> None:
        self.said = f"no complete answer in {self._timeout_s:g} s"
        with self._lock:
            for end in self._ends:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:  # it has already ended
                    continue


class _Connection(http.client.HTTPConnection):
    deadline: _Deadline

    def connect(self) -> None:
        super().connect()
        self.deadline.follow(self.sock)


class _TlsConnection(http.client.HTTPSConnection, _Connection):
    """`HTTPSConnection.connect` calls `_Connection.connect` before the TLS handshake."""


class _Web(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """Replaces urllib's two handlers, with connections that the deadline ends."""

    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._made, _Connection), req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._made, _TlsConnection), req)

    def _made(self, kind: type[_Connection], host: str, **rest: Any) -> _Connection:
        connection = kind(host, **rest)
        connection.deadline = self._deadline
        return connection
