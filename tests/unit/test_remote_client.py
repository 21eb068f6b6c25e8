"""The HTTP client for engines: whatever the other side may grow has a bound. Real sockets."""

import asyncio
import gzip
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from email.utils import formatdate
from pathlib import Path

import pytest

from engine.errors import RemoteFault
from engine.remote import client as module
from engine.remote.client import EngineHttp
from tests.support.stand_in import tls

pytestmark = pytest.mark.anyio
HEAD = b"HTTP/1.1 200 OK\r\n"
STREAM = HEAD + b"content-type: text/event-stream\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


class Peer:
    """Sends `answer` to each request. Then it closes, unless it `stays`, or sends `endless`ly."""

    def __init__(self, answer: bytes, *, stays: bool = False, endless: bytes = b"") -> None:
        self.answer = answer
        self.stays = stays
        self.endless = endless
        self.asked: list[bytes] = []
        self.left = asyncio.Event()
        self.num_sent = 0
        self.url = ""

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked.append(head.lower())
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                await reader.readexactly(int(line.split(b":")[1]))
        try:
            writer.write(self.answer)
            while self.endless:
                writer.write(self.endless)
                self.num_sent += len(self.endless)
                await writer.drain()
            if self.stays:
                assert not await reader.read(), "the client says nothing more"
                self.left.set()
        except OSError:
            self.left.set()
        writer.close()


class Lasting(Peer):
    """Answers one request after another in a connection."""

    num_connections = num_open = 0

    def __init__(self, answer: bytes, end: bytes = b"0\r\n\r\n") -> None:
        super().__init__(answer)
        self.end = end

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        self.num_connections += 1
        self.num_open += 1
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b'\r\n\r\n{"a":1}'):
                writer.write(self.answer)
                await asyncio.sleep(0.01)
                writer.write(self.end)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        self.num_open -= 1


@asynccontextmanager
async def talking(
    peer: Peer, socket: Path | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[EngineHttp]:
    if socket is None:
        server = await asyncio.start_server(peer, "127.0.0.1", 0, ssl=tls)
        place = f"localhost:{server.sockets[0].getsockname()[1]}"
        peer.url = f"https://{place}" if tls else f"http://{place}"
    else:
        server = await asyncio.start_unix_server(peer, socket)
        peer.url = f"unix:{socket}"
    http = EngineHttp(peer.url)
    try:
        yield http
    finally:
        await http.close()
        server.close()
        await server.wait_closed()


async def events(http: EngineHttp) -> list[object]:
    return [event async for event in http.events("/x", {"a": 1})]


async def ask(http: EngineHttp) -> object:
    return await http.ask("GET", "/x")


Call = Callable[[EngineHttp], Awaitable[object]]
BOUNDS: dict[str, tuple[Call, Peer, str]] = {
    "a line": (events, Peer(STREAM + b"data: {", endless=b"x" * 5000), "too long"),
    "an answer that comes whole": (ask, Peer(HEAD + b"\r\n", endless=b"x" * 5000), "too long"),
    "an event that comes whole": (events, Peer(HEAD + b"\r\n", endless=b"x" * 5000), "too long"),
    "an error": (events, Peer(b"HTTP/1.1 500 No\r\n\r\n", endless=b"x" * 5000), "answered 500"),
    "a header": (ask, Peer(HEAD + b"a: ", endless=b"x" * 5000), "broke off"),
    "headers": (ask, Peer(HEAD, endless=b"a: b\r\n" * 100), "broke off"),
    "a status line": (ask, Peer(b"HTTP/1.1 200 ", endless=b"x" * 5000), "broke off"),
    "a chunk's size": (ask, Peer(HEAD + CHUNKED + b"\r\n", endless=b"f" * 5000), "broke off"),
    "silence before the headers": (ask, Peer(b"", stays=True), "timed out"),
    "silence within the headers": (ask, Peer(HEAD, stays=True), "timed out"),
    "silence within a stream": (events, Peer(STREAM + b": hello\n", stays=True), "timed out"),
}


@pytest.mark.parametrize("case", BOUNDS)
async def test_what_the_other_side_grows_has_a_bound(case, monkeypatch):
    for bound in ("MAX_LINE_BYTES", "MAX_ERROR_BYTES", "MAX_WHOLE_BYTES"):
        monkeypatch.setattr(module, bound, 200_000)
    monkeypatch.setattr(module, "SILENCE_S", 0.3)
    call, peer, told = BOUNDS[case]
    peer.left = asyncio.Event()
    async with talking(peer) as http:
        with pytest.raises(RemoteFault, match=told):
            await call(http)
        await asyncio.wait_for(peer.left.wait(), 30)
    assert peer.num_sent < 20_000_000, "with what the sockets between hold"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (STREAM + b'data: {"a": 1}\n\ndata: {"b"', "broke off"),
        (STREAM + b'data: {"a": 1}\n\n', "broke off"),
        (b"", "broke off"),
        (b"not HTTP at all\r\n\r\n", "broke off"),
        (HEAD + b"content-length: 9\r\n\r\n{}", "broke off"),
        (HEAD + b"\r\n[]", "cannot be read"),
        (STREAM + b"data: {\n\n", "cannot be read"),
    ],
)
async def test_an_answer_that_is_cut_off_or_is_none_is_a_fault(answer, told):
    async with talking(Peer(answer)) as http:
        with pytest.raises(RemoteFault, match=told):
            await events(http)


async def test_a_key_is_not_logged_with_an_answer_that_is_no_http(caplog):
    """aiohttp shows the request's headers in some of its errors."""
    at_the_cut = b"HTTP/1.1 500 No\r\n\r\n" + b"x" * 493 + b"sk-secret"
    for said in (b"sk-secret is no HTTP\r\n\r\n", at_the_cut, STREAM + b"data: " + at_the_cut[19:]):
        async with talking(Peer(said)) as http:
            asking = EngineHttp(http.url, "sk-secret")
            with pytest.raises(RemoteFault):
                await events(asking)
            await asking.close()
    assert "failed" in caplog.text and "sk-" not in caplog.text


async def test_a_wait_may_be_told_in_seconds_or_as_a_date():
    now = time.time()
    dates = [formatdate(now + wait, usegmt=True) for wait in (3600, -9)]
    said = {"7": 7, "0": 1, "1.5": 2, "9999999999": 60, "60\r\nretry-after-ms: 4100": 5}
    late = f"Mon, 01 Jan {10**20} 00:00:00 GMT"
    said |= {**dict.fromkeys(("soon", "\u00b2", late)), dates[0]: 60, dates[1]: 1}
    for told, expected in said.items():
        busy = f"HTTP/1.1 429 Busy\r\nretry-after: {told}\r\n\r\n{{}}"
        async with talking(Peer(busy.encode())) as http:
            with pytest.raises(RemoteFault) as found:
                await events(http)
        assert expected == found.value.retry_after_s, told


async def test_an_engine_that_is_not_there_cannot_be_reached(tmp_path):
    async with talking(Peer(b"")) as http:
        pass
    for url in (http.url, f"unix:{tmp_path}/none", "http://no.such.host.invalid:1"):
        gone = EngineHttp(url)
        with pytest.raises(RemoteFault, match="cannot be reached"):
            await ask(gone)
        await gone.close()


async def test_events_come_by_lines_of_either_end_and_comments_are_none():
    stream = b': hi\r\n\r\ndata: {"a": 1}\r\n\r\ndata:{"b": 2}\n\ndata: [DONE]\n\n'
    peer = Peer(STREAM + stream, stays=True)
    async with talking(peer) as http:
        assert [{"a": 1}, {"b": 2}] == await events(http)
        await asyncio.wait_for(peer.left.wait(), 30)


async def test_a_request_that_is_left_ends_its_connection():
    peer = Peer(STREAM + b'data: {"a": 1}\n\n', stays=True)
    async with talking(peer) as http:
        async with http.request("POST", "/x", b"{}") as answer:
            assert [b'data: {"a": 1}', b""] == await answer.lines()
        await asyncio.wait_for(peer.left.wait(), 30)


async def test_with_tls_the_connection_of_an_answer_that_came_to_its_end_is_used_again(
    tmp_path, monkeypatch
):
    own = tls(tmp_path, monkeypatch)
    done = b'data: {"a": 1}\n\ndata: [DONE]\n\n'
    stream = STREAM[:-2] + CHUNKED + b"\r\n%x\r\n" % len(done) + done + b"\r\n"
    for peer, used in ((Lasting(stream), [1, 1, 1, 2]), (Lasting(stream), [1, 2, 3, 5])):
        async with talking(peer, tls=own if used[1] == 1 else None) as http:
            counts = list[int]()
            for _ in range(3):
                assert [{"a": 1}] == await events(http)
                counts.append(peer.num_connections)
            async with http.request("POST", "/x", b'{"a":1}'):
                pass  # leaves before the end
            assert [{"a": 1}] == await events(http)
            assert used == [*counts, peer.num_connections]
        while peer.num_open:
            await asyncio.sleep(0.01)


async def test_what_is_said_unasked_is_nobodys_answer(tmp_path, monkeypatch):
    """A proxy may say that a connection was idle for too long; or it answers twice."""
    answer = HEAD + b"content-length: 8\r\n\r\n" + b'{"a": 1}'
    peer = Lasting(answer, end=answer.replace(b"1}", b"2}"))
    async with talking(peer, tls=tls(tmp_path, monkeypatch)) as http:
        for number in range(1, 4):
            assert (200, {"a": 1}) == await http.ask("POST", "/x", {"a": 1})
            assert number == peer.num_connections
            await asyncio.sleep(0.1)
    while peer.num_open:
        await asyncio.sleep(0.01)


async def test_nothing_is_followed_kept_expanded_or_taken_from_the_environment(monkeypatch):
    """Redirects, cookies, compression and proxies."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    packed = gzip.compress(b"x" * 100)
    head = b"HTTP/1.1 302 Found\r\nlocation: /elsewhere\r\nset-cookie: a=b\r\n"
    about = b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed)
    peer = Peer(head + about + packed)
    async with talking(peer) as http:
        for _ in range(2):
            async with http.request("GET", "/x") as answer:
                assert (302, packed) == (answer.status, await answer.whole())
    assert [True, True] == [each.startswith(b"get /x ") for each in peer.asked]
    assert not any(b"cookie" in each or b"gzip" in each for each in peer.asked)


async def test_a_long_prompt_goes_over_a_unix_socket_too(tmp_path):
    peer = Peer(HEAD + b"content-length: 8\r\n\r\n" + b'{"a": 1}')
    async with talking(peer, tmp_path / "s") as http:
        found = [each async for each in http.events("/x", {"prompt": [1] * 1_000_000})]
    assert [{"a": 1}] == found
    assert b"content-length: 2000012" in peer.asked[0]
