"""Stand-ins for servers elsewhere: real HTTP on 127.0.0.1, and no line of the log."""

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import connector
from werkzeug.serving import make_ssl_devcert

from engine.remote import client
from tests.patience import PATIENCE_S

RESET = "reset"  # the connection is closed with what was sent so far
WAIT = "wait"  # until the test says `go`

Script = Sequence[bytes | float | str]


class StandIn(ThreadingHTTPServer):
    """On a free port, answered by `handler`."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.go = threading.Event()
        self.left = threading.Event()  # somebody closed the connection before the end
        self.num_connections = 0

    @property
    def url(self) -> str:
        scheme = "https" if isinstance(self.socket, ssl.SSLSocket) else "http"
        return f"{scheme}://{'localhost' if scheme == 'https' else '127.0.0.1'}:{self.server_port}"

    def process_request(self, *given: Any) -> None:
        self.num_connections += 1
        super().process_request(*given)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no news."""


class Handler(BaseHTTPRequestHandler):
    """Says documents, and plays scripts."""

    protocol_version = "HTTP/1.1"

    def read_json(self) -> Any:
        """The request's body."""
        return json.loads(self.rfile.read(int(self.headers["content-length"])))

    def say(self, status: int, data: bytes, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def say_json(self, document: Any, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        self.say(status, json.dumps(document).encode(), headers)

    def play(self, script: Script, headers: Mapping[str, str] = {}, status: int = 200) -> None:
        """A stream of events: bytes are sent, numbers are seconds to wait, `RESET` closes. Nothing
        is sent before the first bytes."""
        assert isinstance(self.server, StandIn)
        has_begun = False
        try:
            for step in script:
                if step == RESET:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if step == WAIT:
                    assert self.server.go.wait(30)
                elif isinstance(step, float):
                    time.sleep(step)
                else:
                    assert isinstance(step, bytes)
                    if not has_begun:
                        self._begin(headers, status)
                        has_begun = True
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(step), step))
                    self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.server.left.set()

    def _begin(self, headers: Mapping[str, str], status: int) -> None:
        self.send_response(status)
        about = {"content-type": "text/event-stream", "transfer-encoding": "chunked"}
        for name, value in {**about, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Says nothing."""


def tls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Of a server at `localhost`, whom our client trusts from now on."""
    cert, key = make_ssl_devcert(str(folder / "tls"), cn="localhost")
    trusting, own = ssl.create_default_context(cafile=cert), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(cert, key)
    monkeypatch.setattr(connector, "_SSL_CONTEXT_VERIFIED", trusting)
    for patience in ("IDLE_S", "END_S"):  # a busy machine is not what a test with it is about
        monkeypatch.setattr(client, patience, PATIENCE_S)
    return own


Server = TypeVar("Server", bound=StandIn)


@contextmanager
def served(server: Server) -> Iterator[Server]:
    """The same, answering."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """The URL of one that gives this answer to every GET."""

    class Same(Handler):
        def do_GET(self) -> None:
            self.say(status, body)

    with served(StandIn(Same)) as server:
        yield server.url
