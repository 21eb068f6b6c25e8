"""The HTTP server ends at a signal, and at once at a second one."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette

from cachesvc.server.connection import http_config
from cachesvc.server.http import HttpServer


@pytest.mark.parametrize("signals", [1, 2])
def test_a_second_signal_ends_the_server_without_a_traceback(
    signals: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ended: list[bool] = []

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            ended.append(True)

    def interrupt() -> None:
        for _ in range(signals):
            server._stop(signal.SIGINT)

    config = http_config(Starlette(lifespan=lifespan), loop="asyncio", lifespan="on")
    server = HttpServer(config, interrupt, lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(server.serve(sockets=[listener]))
    assert [True] == ended
    assert (signals == 2) == server.force_exit
    assert "SIGINT: finishing running requests" in caplog.text
    assert [] == [each for each in caplog.records if each.levelno > logging.INFO]
