"""The answers of a starting server, and how it leaves its port."""

import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
import uvicorn

from cachesvc.server.connection import http_config
from cachesvc.server.startup import Startup, answering

TIMEOUT_S = 60.0


@pytest.fixture
def listener():
    listening = socket.create_server(("127.0.0.1", 0))
    yield listening
    listening.close()


def reason(listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=TIMEOUT_S)
    with refused.value as answer:
        assert 503 == answer.code
        return str(json.loads(answer.read())["reason"])


def test_it_answers_what_it_waits_for(listener):
    startup = Startup()
    with answering(listener, startup):
        assert "the server is starting: starting" == reason(listener)
        with startup.during("loading"):
            assert "the server is starting: loading" == reason(listener)


def test_its_log_names_each_phase_and_work_once(caplog):
    startup = Startup()
    with caplog.at_level("INFO"), startup.during("loading"):
        for part in (0.0, 0.1, 0.2):
            startup.progress("reading the file", part)
        startup.progress("writing", 0.5)
        startup.progress("ready", 1.0)
    assert ["loading", "reading the file", "writing: 50%"] == caplog.messages
    assert ["loading"] == list(startup.took_s)


def test_it_leaves_also_when_it_ends_at_once(listener):
    with answering(listener, Startup()):
        pass


async def _serves(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _passed_on(statuses: list[int | str]) -> None:
    """Notes each answer to a client that asks all the time while one server follows the other."""
    listener = socket.create_server(("127.0.0.1", 0))
    port, done = listener.getsockname()[1], threading.Event()

    def ask() -> None:
        while not done.is_set():
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
            try:
                client.request("GET", "/health/ready")
                statuses.append(client.getresponse().status)
            except (OSError, http.client.HTTPException) as error:
                statuses.append(repr(error))
            client.close()

    asking = threading.Thread(target=ask)
    with answering(listener, Startup()):
        asking.start()
        time.sleep(0.02)
    server = uvicorn.Server(http_config(_serves, loop="asyncio", lifespan="off"))
    serving = threading.Thread(target=server.run, args=([listener],))
    serving.start()
    while statuses.count(200) == 0 and not any(isinstance(each, str) for each in statuses):
        time.sleep(0.01)
    done.set()
    asking.join()
    server.should_exit = True
    serving.join()


def test_no_request_is_lost_between_the_two_servers():
    for _ in range(15):
        statuses: list[int | str] = []
        _passed_on(statuses)
        assert {503, 200} >= set(statuses)  # a slow machine may answer no 503
