"""The start of a server: its phases, and the answers that its port gives meanwhile.

Importing torch and loading a model take seconds to minutes. From the first of them on `/health`
says that the process lives, `/health/ready` what it is waiting for, and everything else 503. The
main thread starts the server; a thread of its own answers until `answering` ends.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import uvicorn

from cachesvc.server.connection import http_config

Show = Callable[[str, float | None], None]  # what is done now, and how much of it where known
RETRY_AFTER_S = 2

_Send = Callable[[dict[str, Any]], Awaitable[None]]


class Startup:
    """Which phase runs and how long each took. `show` hears of every change; any thread reads."""

    def __init__(
        self, show: Show = lambda what, part: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.phase = "starting"
        self._show = show
        self._clock = clock
        self._began_s = clock()
        self._took_s: dict[str, float] = {}

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The block is `phase`."""
        began_s = self._clock()
        self.phase = phase
        self._show(phase, None)
        yield
        self._took_s[phase] = self._clock() - began_s

    def progress(self, what: str, part: float) -> None:
        """Some work within a phase: a share of 1 of it is done."""
        self._show(*((what, part) if part < 1 else (self.phase, None)))

    @property
    def took_s(self) -> Mapping[str, float]:
        """Seconds of each phase that is over, in order."""
        return self._took_s

    @property
    def total_s(self) -> float:
        return self._clock() - self._began_s


@contextlib.contextmanager
def answering(listener: socket.socket, startup: Startup) -> Iterator[None]:
    """Answer on `listener` that the server is starting, while the block runs.

    Connections that come as it ends wait in the listener's queue for who serves on it next.
    """
    config = http_config(
        _Starting(startup), loop="asyncio", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    sockets = [listener.dup()]  # which the server closes as it ends; the listener stays
    thread = threading.Thread(target=server.run, args=(sockets,), name="starting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


class _Starting:
    """The ASGI app of a server that does not serve yet."""

    def __init__(self, startup: Startup) -> None:
        self._startup = startup

    async def __call__(self, scope: Any, receive: Any, send: _Send) -> None:
        reason = f"the server is starting: {self._startup.phase}"
        retry = (b"retry-after", str(RETRY_AFTER_S).encode())
        if scope["path"] == "/health":
            await _answer(send, 200, {"status": "ok"})
        elif scope["path"] == "/health/ready":
            await _answer(send, 503, {"status": "not ready", "reason": reason}, retry)
        elif scope["path"] in ("/", "/admin"):  # a person's browser, which looks again
            refresh = (b"refresh", str(RETRY_AFTER_S).encode())
            await _answer(send, 503, f"cachesvc: {reason}\n", retry, refresh)
        else:
            told = {"message": f"{reason}; try again soon", "type": "server_error"}
            body = {"error": told | {"param": None, "code": "starting"}}
            await _answer(send, 503, body, retry)


async def _answer(
    send: _Send, status: int, body: Mapping[str, Any] | str, *more: tuple[bytes, bytes]
) -> None:
    is_text = isinstance(body, str)
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    headers = [
        (b"content-type", b"text/plain; charset=utf-8" if is_text else b"application/json"),
        (b"content-length", str(len(data)).encode()),
        (b"connection", b"close"),  # the next request goes to who serves then
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
