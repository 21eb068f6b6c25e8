"""The start of a server: its phases, and its port's answers meanwhile.

Importing torch and loading a model take seconds to minutes. Meanwhile `/health` reports that the
process is alive, `/health/ready` what it is waiting for, and everything else answers 503. The main
thread starts the server. A separate thread answers until `answering` ends.
"""

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import uvicorn

from cachesvc.server.connection import http_config

logger = logging.getLogger(__name__)

SAY_EVERY_S = 10.0  # how far work within a phase is
RETRY_AFTER_S = 2
LOOKS, LOOK_S = 20, 0.05  # for the ends of its last connections

_Send = Callable[[dict[str, Any]], Awaitable[None]]


class Startup:
    """The current phase and the time of each; logs what is done. Any thread may read."""

    def __init__(self) -> None:
        self.phase = "starting"
        self._said, self._said_s = "", 0.0
        self._began_s = time.monotonic()
        self.took_s: dict[str, float] = {}  # of each finished phase, in order

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Counts the block as `phase`."""
        began_s = time.monotonic()
        self.phase = phase
        logger.info(phase)
        yield
        self.took_s[phase] = time.monotonic() - began_s

    def progress(self, what: str, part: float) -> None:
        """Logs work within a phase, now and then; `part` is the done share, from 0 to 1."""
        now_s = time.monotonic()
        if part < 1 and (what != self._said or now_s - self._said_s >= SAY_EVERY_S):
            self._said, self._said_s = what, now_s
            logger.info(f"{what}: {part:.0%}" if part else what)

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._began_s


@contextlib.contextmanager
def answering(listener: socket.socket, startup: Startup) -> Iterator[None]:
    """Answers on `listener` that the server is starting, while the block runs.

    Connections that arrive at its end wait in the listener's queue for the next server. Those that
    it has accepted get their answers, and then its thread ends.
    """
    config = http_config(
        _Starting(startup), loop="asyncio", lifespan="off", timeout_graceful_shutdown=1
    )
    server = _Briefly(config)
    sockets = [listener.dup()]  # the server closes it at its end; the listener stays
    threading.Thread(target=server.run, args=(sockets,), name="starting", daemon=True).start()
    try:
        yield
    finally:
        server.leave()


class _Briefly(uvicorn.Server):
    """uvicorn's server, which leaves its port as soon as it is told to. uvicorn's own looks for
    that every tenth of a second, then waits for another, and so would the server that is ready."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # until the port answers
        self._has_left = threading.Event()

    def leave(self) -> None:
        """Returns once no more connections are accepted. Any thread but its own."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._told.set)
        self._has_left.wait()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        finally:
            self._has_left.set()

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not self.should_exit:
            await self.on_tick(0)  # the date in its answers
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), 1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for each in sockets or ():
            asyncio.get_running_loop().remove_reader(each)
        self._has_left.set()
        # uvicorn would reset connections whose requests are on their way.
        for _ in range(LOOKS):
            await asyncio.sleep(LOOK_S)
            if not self.server_state.connections:
                break
        await super().shutdown(sockets)


class _Starting:
    def __init__(self, startup: Startup) -> None:
        self._startup = startup

    async def __call__(self, scope: Any, receive: Any, send: _Send) -> None:
        reason = f"the server is starting: {self._startup.phase}"
        retry = (b"retry-after", str(RETRY_AFTER_S).encode())
        if scope["path"] == "/health":
            await _answer(send, 200, {"status": "ok"})
        elif scope["path"] == "/health/ready":
            await _answer(send, 503, {"status": "not ready", "reason": reason}, retry)
        elif scope["path"] in ("/", "/admin"):  # a browser, which reloads
            refresh = (b"refresh", str(RETRY_AFTER_S).encode())
            await _answer(send, 503, f"cachesvc: {reason}\n", retry, refresh)
        else:
            error = {"message": f"{reason}; try again soon", "type": "server_error"}
            body = {"error": error | {"param": None, "code": "starting"}}
            await _answer(send, 503, body, retry)


async def _answer(
    send: _Send, status: int, body: Mapping[str, Any] | str, *more: tuple[bytes, bytes]
) -> None:
    is_text = isinstance(body, str)
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    headers = [
        (b"content-type", b"text/plain; charset=utf-8" if is_text else b"application/json"),
        (b"content-length", str(len(data)).encode()),
        (b"connection", b"close"),  # the next request goes to the next server
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
