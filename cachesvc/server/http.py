"""The HTTP server and its signals. Event loop only."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from cachesvc.server.supervisor import stop_signals

logger = logging.getLogger(__name__)


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
