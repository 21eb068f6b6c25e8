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
from cachesvc.server.supervisor import stop_signals

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nginx' code for a client that left before the answer

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
Asgi = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]


class HttpServer(uvicorn.Server):
    """uvicorn, except that a signal ends it normally: the process exits with 0.

    After the first, running requests finish within uvicorn's grace. A second ends them with an
    error, and they are settled. Later ones are ignored, also once the server has ended: what
    follows is bounded and saves what was computed.
    """

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], on_stop: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._on_stop = on_stop
        self._num_signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, does not raise the signal again after the server has stopped."""
        loop = asyncio.get_running_loop()
        numbers = stop_signals()
        for number in numbers:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    def _stop(self, number: signal.Signals) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            logger.info(f"{number.name}: finishing running requests; send it again to end them")
            self.should_exit = True
            self._on_stop()
        elif self._num_signals == 2:
            logger.info(f"{number.name}: ending {len(self.server_state.tasks)} running requests")
            for task in self.server_state.tasks:
                task.cancel()


@dataclass(frozen=True, slots=True)
class Timed:
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
