"""A connection whose request does not end: how much of it is kept, and for how long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from cachesvc.server.connection import BoundedConnection

pytestmark = pytest.mark.anyio

GET = b"GET / HTTP/1.1\r\nHost: here\r\n"
POST = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 20\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more and (message := await receive())["type"] == "http.request":
        body, more = body + message["body"], message["more_body"]
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def connected(
    **bounds: float,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client of `echo` behind connections with these bounds."""
    kind = type("Bounded", (BoundedConnection,), bounds)
    config, state = uvicorn.Config(echo, lifespan="off", log_config=None), ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: kind(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.close()
        await server.wait_closed()


async def test_headers_without_end_are_refused() -> None:
    async with connected(max_head_bytes=1000) as (reader, writer):
        writer.write(GET + b"X: " + b"a" * 2000)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400") and b"Headers exceed 1000 bytes" in answer


@pytest.mark.parametrize("begun", [b"", b"GET / HT", GET, POST, POST + b"half"])
async def test_a_request_that_never_ends_is_given_up(begun: bytes) -> None:
    async with connected(head_s=0.05, body_s=0.05) as (reader, writer):
        writer.write(begun)
        assert b"did not arrive in time" in await reader.read()


async def test_what_arrives_is_answered_however_long_it_is() -> None:
    async with connected(max_head_bytes=200) as (reader, writer):
        for _ in range(3):  # one after another on one connection
            writer.write(POST + b"a" * 20)
            answer = await reader.readuntil(b"a" * 20)
            assert answer.startswith(b"HTTP/1.1 200")
        writer.write(GET + b"X: " + b"a" * 100 + b"\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
