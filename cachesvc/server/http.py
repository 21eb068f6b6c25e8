"""The HTTP server: its signals and its response counts. Event loop only."""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import uvicorn

from cachesvc.observability.metrics import Metrics

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nginx' code for a client that left before the answer

_Message = MutableMapping[str, Any]
Asgi = Callable[
    [
        MutableMapping[str, Any],
        Callable[[], Awaitable[_Message]],
        Callable[[_Message], Awaitable[None]],
    ],
    Awaitable[None],
]


class HttpServer(uvicorn.Server):
    """uvicorn, except that a signal ends it normally: the process exits with 0."""

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], on_stop: Callable[[], None]
    ) -> None:
        config.app = _cancelled_quietly(config.app)
        super().__init__(config)
        self._on_ready = on_ready
        self._on_stop = on_stop
        self._stopping = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, does not raise the signal again after the server has stopped."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self, number: signal.Signals) -> None:
        if self._stopping:
            self.force_exit = True
            return
        logger.info(f"{number.name}: finishing running requests; send it again to stop at once")
        self._stopping = self.should_exit = True
        self._on_stop()


def _cancelled_quietly(app: Any) -> Asgi:
    """The app, whose end after a second signal leaves no traceback in the log: nobody waits for
    its shutdown then, and the loop cancels it."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        async def tell(message: _Message) -> None:
            task = asyncio.current_task()
            if message["type"] == "lifespan.shutdown.failed" and task and task.cancelling():
                message = {**message, "message": ""}
            await send(message)

        await app(scope, receive, tell if scope["type"] == "lifespan" else send)

    return call


@dataclass(frozen=True, slots=True)
class Timed:
    """Pure ASGI middleware that counts responses by route and code."""

    app: Asgi
    metrics: Metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status: int | None = None

        async def watch(message: _Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception:
            status = status or 500
            raise
        finally:
            elapsed_s = time.perf_counter() - started
            self.metrics.observe_http(scope["path"], status or CLIENT_GONE, elapsed_s)
