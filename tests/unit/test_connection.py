"""A connection whose request does not end: how much of it is kept, and for how long."""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from uvicorn.server import ServerState

from cachesvc.server.connection import MAX_HEAD_BYTES, BoundedConnection, http_config

GET = b"GET / HTTP/1.1\r\nHost: here\r\n"
POST = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 20\r\n\r\n"


CHUNKED = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def echo(scope, receive, send):
    body, more = b"", True
    while more and (message := await receive())["type"] == "http.request":
        body, more = body + message["body"], message["more_body"]
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def served(app=echo, **bounds):
    """The address of `app` behind connections with these bounds."""
    kind = type("Bounded", (BoundedConnection,), bounds)
    config, state = http_config(app, lifespan="off"), ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: kind(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    try:
        yield server.sockets[0].getsockname()
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        await server.wait_closed()


@contextlib.asynccontextmanager
async def connected(app=echo, **bounds):
    """A client of it."""
    async with served(app, **bounds) as address:
        reader, writer = await asyncio.open_connection(*address)
        try:
            yield reader, writer
        finally:
            writer.close()


async def ask(reader, writer):
    writer.write(GET + b"\r\n")
    return (await reader.readuntil(b"\r\n\r\n"))[:12]


@pytest.mark.parametrize("ends", [b"", b"\r\n\r\n"])
async def test_a_head_beyond_the_bound_is_refused_also_when_it_comes_at_once(ends):
    async with connected() as (reader, writer):
        writer.write(GET + b"X: " + b"a" * MAX_HEAD_BYTES + ends)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 431") and b"Headers exceed 65536 bytes" in answer


async def test_a_head_of_just_the_bound_is_served():
    async with connected() as (reader, writer):
        for _ in range(2):
            head = POST[:-2] + b"X: "
            writer.write(head + b"a" * (MAX_HEAD_BYTES - len(head) - 4) + b"\r\n\r\n" + b"b" * 20)
            answer = await reader.readuntil(b"b" * 20)
            assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "filler",
    [b"0\r\n" + b"X: y\r\n" * 20_000, b"0\r\nX: " + b"y" * 100_000, b"1;" + b"x" * 100_000],
)
async def test_trailers_and_chunk_extensions_without_end_are_refused(filler):
    """300 MiB of them would be kept, before any key is checked."""
    before, sent = resident_bytes(), 0
    async with connected() as (reader, writer):
        writer.write(CHUNKED + b"1\r\na\r\n" + filler)
        with contextlib.suppress(ConnectionError):
            while sent < 300 << 20:
                writer.write(b"X: y\r\n" * 20_000)
                sent += 120_000
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            assert (await reader.read(12)) in (b"HTTP/1.1 400", b"")
    assert sent < 30 << 20
    assert resident_bytes() - before < 32 << 20


async def test_trailers_are_no_headers():
    """A key in a trailer would come after the check of the keys."""
    seen = []

    async def app(scope, receive, send):
        await echo(scope, receive, send)
        seen.extend(scope["headers"])

    async with connected(app) as (reader, writer):
        writer.write(CHUNKED + b"1\r\na\r\n0\r\nAuthorization: Bearer x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert [b"host", b"transfer-encoding"] == [name for name, _ in seen]


async def test_a_body_that_only_drips_is_given_up():
    async with connected(body_s=0.1, body_bytes_per_s=1000) as (reader, writer):
        writer.write(POST.replace(b"20", b"2000"))
        # Read as it comes: a byte sent after the server has closed resets the connection.
        answer = asyncio.create_task(reader.readuntil(b"did not arrive in time"))
        for _ in range(200):
            if not answer.done():
                writer.write(b"a")
                await asyncio.sleep(0.005)
        assert (await answer).startswith(b"HTTP/1.1 408")


async def test_a_body_that_nobody_reads_ends_its_connection():
    """The request was refused at its head; its client sends on without end."""

    async def refuse(scope, receive, send):
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with connected(refuse, max_unread_bytes=100_000) as (reader, writer):
        writer.write(POST.replace(b"20", b"%d" % (1 << 30)))
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        sent = 0
        with contextlib.suppress(ConnectionError):
            for _ in range(3000):
                writer.write(b"a" * 10_000)
                await writer.drain()
                sent += 10_000
        assert sent < 20 << 20


async def test_a_client_that_never_reads_is_cut_off():
    """uvicorn would wait for it for ever, also after the route has given up."""
    ended = asyncio.Event()

    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await asyncio.wait_for(receive(), 10))["type"] != "http.disconnect":
            for _ in range(100):
                await send({"type": "http.response.body", "body": b"a" * 10**5, "more_body": True})
        ended.set()

    async with connected(endless, write_s=0.1) as (_, writer):
        writer.write(GET + b"\r\n")
        await asyncio.wait_for(ended.wait(), 10)
    assert ended.is_set()


async def test_a_flood_of_pipelined_requests_ends_its_connection():
    started = 0

    async def slow(scope, receive, send):
        nonlocal started
        started += 1
        await asyncio.sleep(0.1)
        await echo(scope, receive, send)

    async with connected(slow) as (reader, writer):
        writer.write((GET + b"\r\n") * 2000)
        with contextlib.suppress(ConnectionError):
            assert b"" == await reader.read()
    assert started <= 2


@pytest.mark.parametrize("begun", [b"", b"GET / HT", GET, POST, POST + b"half"])
async def test_a_request_that_never_ends_is_given_up(begun):
    async with connected(head_s=0.05, body_s=0.05) as (reader, writer):
        writer.write(begun)
        assert b"did not arrive in time" in await reader.read()


BOUND = 40


@pytest.mark.parametrize("begun", [b"", b"GET / HT", POST + b"half"])
async def test_one_connection_too_many_closes_those_that_waited_longest(begun):
    async with served(max_connections=BOUND) as address:
        crowd = []
        for _ in range(4 * BOUND):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(begun)
            crowd.append((reader, writer))
        first, _ = crowd[0]
        with contextlib.suppress(ConnectionError):  # closed with bytes unread
            assert b"" == await first.read()
        last = await asyncio.open_connection(*address)
        assert b"HTTP/1.1 200" == await ask(*last)
        assert sum(not reader.at_eof() for reader, _ in crowd) >= BOUND / 2
        for _, writer in [*crowd, last]:
            writer.close()


async def test_a_crowd_from_one_address_does_not_close_those_of_another():
    async with served(max_connections=BOUND) as address:
        polite = await asyncio.open_connection(*address, local_addr=("127.0.0.2", 0))
        assert b"HTTP/1.1 200" == await ask(*polite)
        crowd = [await asyncio.open_connection(*address) for _ in range(4 * BOUND)]
        assert b"HTTP/1.1 200" == await ask(*polite)
        for _, writer in [*crowd, polite]:
            writer.close()


async def test_where_all_are_being_answered_the_next_is_refused():
    release, running = asyncio.Event(), asyncio.Semaphore(0)

    async def slow(scope, receive, send):
        running.release()
        await release.wait()
        await echo(scope, receive, send)

    async with served(slow, max_connections=3) as address:
        crowd = [await asyncio.open_connection(*address) for _ in range(3)]
        answers = [asyncio.create_task(ask(*client)) for client in crowd]
        for _ in crowd:
            await running.acquire()
        reader, writer = await asyncio.open_connection(*address)
        refused = await reader.read()
        assert refused.startswith(b"HTTP/1.1 503") and b"Too many connections" in refused
        release.set()
        assert [b"HTTP/1.1 200"] * 3 == await asyncio.gather(*answers)
        for _, other in [*crowd, (reader, writer)]:
            other.close()


async def test_an_idle_connection_outlives_proxies_and_clients():
    """nginx and load balancers of clouds reuse a connection for up to 60 s."""
    made = []

    def connection_made(self, transport):
        made.append(self)
        BoundedConnection.connection_made(self, transport)

    async with connected(connection_made=connection_made) as client:
        await ask(*client)
        closing = made[0].timeout_keep_alive_task
        assert closing is not None and closing.when() - asyncio.get_running_loop().time() > 70


@pytest.mark.parametrize("pauses", [False, True])
async def test_a_head_is_written_with_what_follows_it_in_one_turn_of_the_loop(pauses):
    writes, may_end = [], asyncio.Event()

    class Noted:
        def __init__(self, transport):
            self._transport = transport

        def __getattr__(self, name):
            return getattr(self._transport, name)

        def write(self, data):
            writes.append(data)
            self._transport.write(data)

    async def app(scope, receive, send):
        async def paused(message):
            if pauses and message["type"] == "http.response.body":
                await may_end.wait()
            await send(message)

        await echo(scope, receive, paused)

    def connection_made(self, transport):
        BoundedConnection.connection_made(self, Noted(transport))

    async with connected(app, connection_made=connection_made) as (reader, writer):
        for _ in range(2):
            writer.write(POST + b"b" * 20)
            await reader.readuntil(b"\r\n\r\n") if pauses else None
            may_end.set()
            assert (await reader.readuntil(b"b" * 20)).endswith(b"b" * 20)
            may_end.clear()
    assert (2 if pauses else 1) * 2 == len(writes)
