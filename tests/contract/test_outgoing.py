"""Receivers that send elsewhere, trickle, never end, speak no HTTP, or name addresses that are
none: each is an error in time, and nothing follows where they point."""

import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from billing import push
from billing.errors import ExportError, ReceiverError
from billing.outgoing import send
from billing.reports.heads import send_heads
from billing.usage import Usage
from tests.support.billing import TestLedger

LONG_S = 60.0
Speak = Callable[[socket.socket], None]


@contextmanager
def speaking(speak: Speak) -> Iterator[tuple[str, list[bytes]]]:
    """A server that reads the head of each request and then says what it likes."""
    heads: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    heads.append(connection.recv(65536))
                    try:
                        speak(connection)
                    except OSError:
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/hook", heads
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def says(*lines: str) -> Speak:
    text = "\r\n".join((*lines, "", "")).encode()
    return lambda connection: connection.sendall(text)


def trickle_head(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 ")
    while True:
        connection.sendall(b"O")
        time.sleep(0.02)


def trickle_body(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.02)


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65536)


def posted(url: str, timeout_s: float = LONG_S) -> bytes:
    request = urllib.request.Request(url, b"{}", method="POST")
    return send(request, timeout_s=timeout_s, most_bytes=1024)


def pushed(house: TestLedger, url: str) -> int:
    return push.push(house.ledger.store, house.ledger.book, "push", url, "secret", "s")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_and_is_no_success(house: TestLedger, status: int) -> None:
    """A metering service cannot send the key elsewhere."""
    house.charge("r1", Usage(miss=1))
    with speaking(says("HTTP/1.1 204 No Content")) as (elsewhere, came):
        moved = says(f"HTTP/1.1 {status} Moved", f"location: {elsewhere}", "content-length: 0")
        with speaking(moved) as (url, heads):
            with pytest.raises(ReceiverError, match="redirects are"):
                posted(url)
            with pytest.raises(ExportError, match="redirects are"):
                pushed(house, url)
    assert (2, []) == (len(heads), came)


def test_a_metering_service_that_trickles_ends_in_time(
    house: TestLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.charge("r1", Usage(miss=1))
    monkeypatch.setattr(push, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(push, "WHOLE_S", 0.2)
    with (
        speaking(trickle_body) as (url, heads),
        pytest.raises(ExportError, match=r"no complete answer in 0\.2 s"),
    ):
        pushed(house, url)
    assert push.TRIES == len(heads)


@pytest.mark.parametrize("slow", [trickle_head, trickle_body])
def test_an_answer_that_trickles_ends_in_time(slow: Speak) -> None:
    """Each byte comes well within the timeout, and there are bytes for a day."""
    with (
        speaking(slow) as (url, _),
        pytest.raises(ReceiverError, match=r"no complete answer in 0\.5 s|timed out"),
    ):
        posted(url, timeout_s=0.5)


def test_of_an_endless_answer_the_beginning_is_read() -> None:
    with speaking(endless) as (url, _):
        assert b"x" * 1024 == posted(url)


@pytest.mark.parametrize("line", ["", "nonsense", "HTTP/1.1 999999 x", "SSH-2.0-OpenSSH"])
def test_an_answer_that_is_not_http_is_an_error(line: str) -> None:
    """Also to what sends heads: another error would end the task that watches the money."""
    with speaking(says(line)) as (url, heads):
        with pytest.raises(ReceiverError):
            posted(url)
        with pytest.raises(ExportError, match="the heads could not be written"):
            send_heads({"at_ns": 1}, url)
    assert 2 == len(heads)


@pytest.mark.parametrize("where", ["http://[", "http://..", "gopher://x", "http://a b:x", "\x7f"])
def test_an_invalid_redirect_is_an_error(where: str) -> None:
    moved = says("HTTP/1.1 302 Found", f"location: {where}")
    with speaking(moved) as (url, _), pytest.raises(ReceiverError):
        posted(url)
