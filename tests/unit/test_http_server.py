"""The HTTP server ends at a signal, at once at a second. It saves what was computed."""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import httpx
import pytest
from fastapi import FastAPI

from api.app import create_app
from billing.gate.outcomes import Outcome
from cachesvc.server.connection import http_config
from cachesvc.server.http import HttpServer
from tests.api.bank import HELLO
from tests.support.wire import Script, fake_house

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], object] | int | None


@pytest.fixture
def handlers():
    """The handlers of before are in force after the test."""
    before: dict[signal.Signals, Handler] = {each: signal.getsignal(each) for each in SIGNALS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.fixture
def house():
    house = fake_house()
    yield house
    house.close()


def serve_until(app: FastAPI, visit: Callable[[str, Callable[[int], None]], None]) -> None:
    """Returns when the server has ended. `visit`, on a thread of its own, gets its URL, and what
    sends it so many signals."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()

        def interrupt(times: int) -> None:
            for _ in range(times):
                loop.call_soon_threadsafe(server._stop, signal.SIGINT)

        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await ready.wait()
        await asyncio.to_thread(visit, url, interrupt)
        await serving

    ready = asyncio.Event()
    config = http_config(app, loop="asyncio", lifespan="on", timeout_graceful_shutdown=60)
    server = HttpServer(config, ready.set, lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        asyncio.run(serve())


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("times", [1, 2, 3])
def test_any_number_of_signals_ends_the_server_without_a_traceback(times, house, caplog):
    caplog.set_level(logging.INFO)
    serve_until(create_app(house.wire), lambda url, interrupt: interrupt(times))
    assert "SIGINT: finishing running requests" in caplog.text
    assert [] == [each for each in caplog.records if each.levelno > logging.INFO]
    assert {signal.SIG_IGN} == set(map(signal.getsignal, SIGNALS)), "while the tiers are flushed"


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("ignored", "ends"), [(False, True), (True, False)])
def test_a_closed_terminal_ends_the_server_unless_nohup_said_otherwise(
    ignored, ends, house, caplog
):
    caplog.set_level(logging.INFO)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    def visit(url: str, interrupt: Callable[[int], None]) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.2)
        interrupt(int(not ends))

    serve_until(create_app(house.wire), visit)
    assert ends == ("SIGHUP: finishing running requests" in caplog.text)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_a_second_signal_ends_is_told_so_and_settled(stream, house, caplog):
    house.engine.script = Script(answer="x" * 10_000, step_s=0.01)
    told: list[httpx.Response] = []

    def visit(url: str, interrupt: Callable[[int], None]) -> None:
        path, body = f"{url}/v1/chat/completions", HELLO | {"stream": stream}
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(httpx.post, path, json=body, timeout=60)
            while not any(house.engine.tokens_made.values()):
                time.sleep(0.01)
            interrupt(3)
            told.append(asked.result())

    serve_until(create_app(house.wire), visit)
    assert (200 if stream else 500) == told[0].status_code
    assert "the server is stopping" in told[0].text
    result = house.meter.last.served
    assert result is not None and Outcome.FAILED is result.outcome
    assert [] == [each for each in caplog.records if each.exc_info]
