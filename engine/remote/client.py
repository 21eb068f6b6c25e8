"""A plain HTTP/1.1 client for an engine's answers: a connection a request, so that closing it ends
the request there. For one event loop.

It parses with httptools, as the server does: 12 us an event with 500 streams, where httpx2 takes 75
and aiohttp 27 (two cores of a Xeon).
"""

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson

from engine.errors import EngineError

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
SILENCE_S = 600.0  # without a byte: a prompt may wait long in a busy engine's queue
_READ_BYTES = 1 << 16
_ERROR_CHARS = 500  # of an engine's words in our log


class RemoteFault(EngineError):
    """The engine at the URL did not answer as it should. The message is for clients: "The engine
    ended this request: ..."."""


class _Answer:
    """What httptools has read of a response."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.headers: dict[bytes, bytes] = {}
        self.has_headers = False
        self.is_whole = False
        self.data = b""

    @property
    def status(self) -> int:
        return int(self.parser.get_status_code())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.has_headers = True

    def on_body(self, data: bytes) -> None:
        self.data += data

    def on_message_complete(self) -> None:
        self.is_whole = True


class EngineHttp:
    """The engine at `url`: http://10.0.0.5:8000, or unix:/run/vllm.sock. All calls raise
    RemoteFault."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = parts.path if parts.scheme == "unix" else None
        self.url = url
        self._host = parts.hostname or ""
        self._is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._folder = "" if self._socket else parts.path.rstrip("/")

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The events of a stream, up to its `[DONE]`, or the answer that comes whole."""
        async with self._asked("POST", path, body) as (answer, reader):
            if answer.status != 200:
                raise self._refused(path, answer.status, await self._rest(answer, reader))
            if not answer.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                yield self._read(path, await self._rest(answer, reader))
                return
            while True:
                *lines, answer.data = answer.data.split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield self._read(path, data)
                if answer.is_whole:
                    raise self._fault(path, "its stream ended early", "its answer broke off")
                await self._more(answer, reader)

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, Any]:
        """The status of a response, and what it holds: JSON or else text."""
        async with self._asked(method, path, body) as (answer, reader):
            data = await self._rest(answer, reader)
        try:
            return answer.status, orjson.loads(data)
        except ValueError:
            return answer.status, data.decode(errors="replace")

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[tuple[_Answer, asyncio.StreamReader]]:
        """A response with its headers. The connection is closed at the end of the block."""
        context = ssl.create_default_context() if self._is_tls else None
        try:
            async with asyncio.timeout(CONNECT_S):
                if self._socket is not None:
                    reader, writer = await asyncio.open_unix_connection(self._socket)
                else:
                    reader, writer = await asyncio.open_connection(
                        self._host, self._port, ssl=context
                    )
        except OSError as error:  # also a timeout
            raise self._fault(path, repr(error), "it cannot be reached") from None
        try:
            writer.write(self._head(method, path, data := b"" if body is None else _json(body)))
            writer.write(data)
            answer = _Answer()
            while not answer.has_headers:
                await self._more(answer, reader)
            yield answer, reader
        finally:
            writer.transport.abort()

    def _head(self, method: str, path: str, data: bytes) -> bytes:
        lines = [
            f"{method} {self._folder}{path} HTTP/1.1",
            f"host: {self._host}:{self._port}",
            "connection: close",
            "content-type: application/json",
            f"content-length: {len(data)}",
        ]
        return "\r\n".join([*lines, "", ""]).encode()

    async def _more(self, answer: _Answer, reader: asyncio.StreamReader) -> None:
        """Reads what comes next. Raises RemoteFault if nothing does."""
        try:
            async with asyncio.timeout(SILENCE_S):
                data = await reader.read(_READ_BYTES)
            if not data:
                raise ConnectionResetError("the connection was closed")
            answer.parser.feed_data(data)
        except TimeoutError:
            raise self._fault("", f"silent for {SILENCE_S:g} s", "it timed out") from None
        except (OSError, httptools.HttpParserError) as error:
            raise self._fault("", repr(error), "its answer broke off") from None

    async def _rest(self, answer: _Answer, reader: asyncio.StreamReader) -> bytes:
        while not answer.is_whole:
            await self._more(answer, reader)
        return answer.data

    def _read(self, path: str, data: bytes) -> dict[str, Any]:
        try:
            event = orjson.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            said = data[:_ERROR_CHARS].decode(errors="replace")
            raise self._fault(path, f"no JSON object: {said}", "its answer cannot be read")
        if error := event.get("error"):
            raise self._fault(path, str(error)[:_ERROR_CHARS], "it ended the request with an error")
        return event

    def _refused(self, path: str, status: int, data: bytes) -> RemoteFault:
        said = data[:_ERROR_CHARS].decode(errors="replace")
        what = "it is overloaded; try again later" if status == 429 else f"it answered {status}"
        return self._fault(path, f"{status}: {said}", what)

    def _fault(self, path: str, why: str, what: str) -> RemoteFault:
        logger.warning(f"the engine at {self.url}{path} failed in a request: {why}")
        return RemoteFault(what)


def _json(body: Mapping[str, Any]) -> bytes:
    return orjson.dumps(body)
