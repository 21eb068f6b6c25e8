"""The answers of a starting server, and how it leaves its port."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from cachesvc.server.startup import Startup, answering

TIMEOUT_S = 60.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    listening = socket.create_server(("127.0.0.1", 0))
    yield listening
    listening.close()


def reason(listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=TIMEOUT_S)
    with refused.value as answer:
        assert 503 == answer.code
        return str(json.loads(answer.read())["reason"])


def test_it_answers_what_it_waits_for(listener: socket.socket) -> None:
    startup = Startup()
    with answering(listener, startup):
        assert "the server is starting: starting" == reason(listener)
        with startup.during("loading"):
            assert "the server is starting: loading" == reason(listener)


def test_connections_after_its_end_wait_for_the_next_server(listener: socket.socket) -> None:
    with answering(listener, Startup()):
        reason(listener)
    with socket.create_connection(listener.getsockname(), timeout=TIMEOUT_S) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        listener.settimeout(TIMEOUT_S)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.recv(1 << 10).startswith(b"GET /health ")


def test_it_leaves_also_when_it_ends_at_once(listener: socket.socket) -> None:
    with answering(listener, Startup()):
        pass
