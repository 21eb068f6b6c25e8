"""HTTP to an engine: one connection a request, so that closing it ends the request there. With TLS,
the next one gets the connection of an answer that came to its end.

The only place that knows aiohttp. For one event loop. Whatever the other side may grow is bounded:
lines, answers that come whole, headers (aiohttp's own bounds), and how long it may be silent.
Redirects are not followed, cookies not kept, and the environment's proxies not used.
"""

import asyncio
import io
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
from aiohttp.connector import Connection

from engine.errors import (
    RemoteAway,
    RemoteBusy,
    RemoteDenied,
    RemoteFault,
    RemoteRefused,
    RemoteSilent,
)

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
IDLE_S = 4.0  # of a kept connection: many servers close theirs after 5
END_S = 0.1  # from an answer's last event to its end
SILENCE_S = 600.0  # without a byte: a prompt may wait long in a busy engine's queue
MAX_LINE_BYTES = 8 << 20  # SGLang repeats all of an answer's tokens in each
MAX_WHOLE_BYTES = 256 << 20  # log-probabilities of every token of a long prompt
MAX_ERROR_BYTES = 1 << 16
OF_THE_BODY = frozenset({400, 409, 413, 422})  # they say what is wrong with a request
MAX_RETRY_S = 60  # OpenAI's clients ignore a longer Retry-After
_ERROR_CHARS = 500  # of an engine's words in our log
BROKE_OFF = "The engine's answer broke off."
ENDED_IN_ERROR = "The engine ended the request with an error."
UNREADABLE = "The engine's answer cannot be read."
TOO_LONG = "The engine's answer is too long."


@dataclass(frozen=True, slots=True)
class EngineCall:
    """What was asked of an engine, so that its faults can be told. `key` is never logged."""

    url: str
    key: str = field(default="", repr=False)

    def fault(self, why: str, what: str, kind: type[RemoteFault] = RemoteFault) -> RemoteFault:
        """A fault with the reason in the log, and `what` for the client."""
        logger.warning(f"the engine at {self.url} failed in a request: {self.keyless(why)}")
        return kind(what)

    def keyless(self, words: str) -> str:
        """An engine may repeat the key."""
        return words.replace(self.key, "***") if self.key else words

    def refusal(self, answer: "HttpAnswer", said: bytes) -> RemoteFault:
        """The fault of an answer that is an error, and what it `said`."""
        kind, what = RemoteFault, f"The engine answered {answer.status}."
        if answer.status in OF_THE_BODY:
            kind = RemoteRefused
        elif answer.status in (401, 403, 404):
            kind = RemoteDenied
        elif answer.status == 429:
            kind, what = RemoteBusy, "The engine is overloaded; try again later."
        elif answer.status in (503, 529):  # 529 is Anthropic's
            kind, what = RemoteAway, "The engine cannot serve now; try again later."
        found = self.fault(f"{answer.status}: {self._words(said)}", what, kind)
        found.retry_after_s = _retry_after(answer.headers)
        return found

    def event(self, data: bytes) -> dict[str, Any]:
        """An event of an answer. Raises RemoteFault for one that is none, or is an error."""
        try:
            event = orjson.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            begins = self._words(data)[:20]  # the rest may be an answer's text
            raise self.fault(f"no JSON object, {len(data)} bytes: {begins}", UNREADABLE)
        if event.get("error"):
            raise self.fault(self._words(data), ENDED_IN_ERROR)
        return event

    def _words(self, said: bytes) -> str:
        """An engine's words, for our log. The key is out before they are cut."""
        return self.keyless(said.decode(errors="replace"))[:_ERROR_CHARS]

    @contextmanager
    def faults(self) -> Iterator[None]:
        """aiohttp's errors as ours. Their names alone are safe: some show a request's headers."""
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            why = f"{type(error).__name__}: {error}"
            raise self.fault(why, "The engine cannot be reached.", RemoteAway) from None
        except TimeoutError as error:
            silent = isinstance(error, aiohttp.ServerTimeoutError)
            why = f"silent for {SILENCE_S:g} s" if silent else "longer than engine.max_time"
            raise self.fault(why, "The engine timed out.", RemoteSilent) from None
        except (aiohttp.ClientError, OSError) as error:
            words = str(error).partition("\\n")[0].partition("\n")[0]  # then it quotes the answer
            raise self.fault(f"{type(error).__name__}: {words}", BROKE_OFF) from None


class HttpAnswer:
    """A response. Its headers' names are case-insensitive. Reading it raises RemoteFault."""

    def __init__(self, asked: EngineCall, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self.asked = asked
        self._content = response.content
        self._rest = b""
        self.has_all = False  # its last event came: only its end is left

    @property
    def is_stream(self) -> bool:
        """Whether it comes in events. Raises RemoteFault for an encoding that nobody asked for."""
        if (coded := self.headers.get("content-encoding", "identity").lower()) != "identity":
            raise self.asked.fault(f"its content-encoding is {coded}", UNREADABLE)
        return self.headers.get("content-type", "").lower().startswith("text/event-stream")

    async def read(self) -> bytes:
        """What comes next. Nothing at the end."""
        with self.asked.faults():
            return await self._content.readany()

    async def lines(self) -> list[bytes]:
        """The lines that come next, without their ends. None at the end. Raises RemoteFault for one
        that is cut off."""
        lines: list[bytes] = []
        while not lines:
            if not (data := await self.read()):
                if self._rest:
                    raise self.asked.fault("it ended within a line", BROKE_OFF)
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > MAX_LINE_BYTES:
                raise self.asked.fault("a line is too long", TOO_LONG)
        return lines

    async def beginning(self) -> bytes:
        """The first bytes of an error, which may repeat a long request."""
        said = b""
        while len(said) < MAX_ERROR_BYTES and (data := await self.read()):
            said += data
        return said[:MAX_ERROR_BYTES]

    async def whole(self, most_bytes: int | None = None) -> bytes:
        """All that it holds. Raises RemoteFault for more than `most_bytes`."""
        most_bytes = MAX_WHOLE_BYTES if most_bytes is None else most_bytes
        parts, size = [], 0
        while data := await self.read():
            size += len(data)
            if size > most_bytes:
                raise self.asked.fault(f"more than {most_bytes} bytes", TOO_LONG)
            parts.append(data)
        return b"".join(parts)


class EngineHttp:
    """The engine at `url`: http://10.0.0.5:8000, https://..., or unix:/run/vllm.sock. All calls
    raise RemoteFault. `close` ends what is in flight."""

    def __init__(
        self, url: str, key: str = "", whole_s: float | None = None, *, cut: str = ""
    ) -> None:
        """`key` goes with each request as a bearer token. A request takes `whole_s` at most. Paths
        lose their beginning `cut`."""
        parts = urlsplit(url)
        self.url, self._key = url, key
        self._whole_s, self._cut, self._keeps = whole_s, cut, parts.scheme == "https"
        self._socket = parts.path if parts.scheme == "unix" else None
        self._base = "http://localhost" if self._socket else url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        sent: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[HttpAnswer]:
        """A response with its headers, whatever its status. What it has not sent by the end of the
        block is not waited for. `sent` is called once all of the body is written."""
        asked = EngineCall(f"{self.url}{path}", self._key)
        with asked.faults():
            response = await self._opened().request(
                method,
                self._base + path.removeprefix(self._cut),
                data=None if body is None else _Body(body, sent),
                headers={"content-type": "application/json", **(headers or {})},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(self._whole_s, CONNECT_S, SILENCE_S, CONNECT_S),
            )
        answer = HttpAnswer(asked, response)
        try:
            yield answer
        finally:
            if answer.has_all and self._keeps:
                with suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with asyncio.timeout(END_S):
                        await response.read()
            response.close()

    async def events(
        self, path: str, body: Mapping[str, Any], sent: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[dict[str, Any]]:
        """The events of a stream, up to its `[DONE]`, or the answer that comes whole."""
        async with self.request("POST", path, orjson.dumps(body), sent=sent) as answer:
            if answer.status != 200:
                raise answer.asked.refusal(answer, await answer.beginning())
            if not answer.is_stream:
                yield answer.asked.event(await answer.whole())
                return
            while lines := await answer.lines():
                for data in (line[5:].strip() for line in lines if line.startswith(b"data:")):
                    if data == b"[DONE]":
                        answer.has_all = True
                        return
                    yield answer.asked.event(data)
            raise answer.asked.fault("its stream ended early", BROKE_OFF)

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, Any]:
        """The status of a response, and what it holds: JSON or else text."""
        data = None if body is None else orjson.dumps(body)
        async with self.request(method, path, data) as answer:
            said = await answer.whole()
        with suppress(ValueError):
            return answer.status, orjson.loads(said)
        return answer.status, said.decode(errors="replace")

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            path = self._socket
            tcp = _Kept if self._keeps else aiohttp.TCPConnector
            connect = tcp if path is None else partial(aiohttp.UnixConnector, path)
            key = {"authorization": f"Bearer {self._key}"} if self._key else {}
            kept: Any = {"keepalive_timeout": IDLE_S} if self._keeps else {"force_close": True}
            self._session = aiohttp.ClientSession(
                connector=connect(limit=0, **kept),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # a few bytes would become many
                headers={"accept-encoding": "identity", "user-agent": "cachesvc", **key},
            )
        return self._session


class _Kept(aiohttp.TCPConnector):
    """Gives out no connection on which something came unasked: the next would take it as theirs."""

    async def connect(self, *asked: Any, **more: Any) -> Connection:
        for _ in range(100):  # else there is another at the end, that speaks first
            found = await super().connect(*asked, **more)
            if found.protocol is not None and not found.protocol.should_close:
                return found
            found.close()
        raise aiohttp.ServerDisconnectedError("it speaks unasked")


class _Body(aiohttp.BytesIOPayload):
    """Calls `written` once all of it is."""

    def __init__(self, body: bytes, written: Callable[[], None]) -> None:
        super().__init__(io.BytesIO(body))
        self._written = written

    async def write_with_length(self, writer: Any, content_length: int | None) -> None:
        await super().write_with_length(writer, content_length)
        self._written()


def _retry_after(headers: Mapping[str, str]) -> int | None:
    """Seconds, of milliseconds, seconds or a date, as OpenAI's clients read them."""
    said, in_ms = headers.get("retry-after", ""), headers.get("retry-after-ms", "")
    with suppress(ValueError, OverflowError):
        if in_ms or said[:1].isdigit():
            wait_s = float(in_ms) / 1000 if in_ms else float(said)
        else:
            wait_s = parsedate_to_datetime(said).timestamp() - time.time()
        return min(max(1, math.ceil(wait_s)), MAX_RETRY_S)
    return None
