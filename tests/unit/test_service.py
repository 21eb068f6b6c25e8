"""The composition root's own decisions: addresses, secrets, signals, counted responses."""

import asyncio
import errno
import socket
from types import SimpleNamespace

import pytest

from api.request_log import RequestLogger
from cachesvc.config.errors import ConfigError
from cachesvc.config.sections import ServerSection
from cachesvc.serve import Startup
from cachesvc.server.listen import bind, check_address, listen
from cachesvc.server.watch import ServerWatch


def test_an_open_server_is_refused_any_other_address():
    for ours in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        check_address(ServerSection(host=ours), requires_keys=False)
    for other in ("0.0.0.0", "::", "192.168.1.5", "localhost.example.org"):
        check_address(ServerSection(host=other), requires_keys=True)
        with pytest.raises(ConfigError, match="--require-keys"):
            check_address(ServerSection(host=other), requires_keys=False)


def test_a_bound_port_refuses_connections_until_it_is_opened():
    with bind("127.0.0.1", 0) as listener:
        with socket.socket() as client:
            assert errno.ECONNREFUSED == client.connect_ex(listener.getsockname())
        listen(listener)
        with socket.socket() as client:
            assert 0 == client.connect_ex(listener.getsockname())


def test_of_two_servers_that_start_on_one_port_the_second_is_told():
    with bind("127.0.0.1", 0) as one, bind("127.0.0.1", one.getsockname()[1]) as other:
        listen(one)
        with pytest.raises(ConfigError, match="choose another --port"):
            listen(other)


def drive(app, path):
    async def nothing(*_):
        return {"type": "http.request"}

    asyncio.run(
        app({"type": "http", "method": "GET", "path": path, "headers": ()}, nothing, nothing)
    )


def test_responses_are_counted_by_their_code_also_when_they_fail():
    async def answer(scope, receive, send):
        if scope["path"] == "/broken":
            raise ZeroDivisionError
        if scope["path"] != "/left":
            await send({"type": "http.response.start", "status": 200, "headers": ()})

    seen = []
    logged = RequestLogger(answer, lambda path, code, seconds: seen.append((path, code, seconds)))
    for path in ("/fine", "/health", "/broken", "/left"):
        drive(logged, path)
    counted = [("/fine", 200), ("/health", 200), ("/broken", 500), ("/left", 499)]
    assert counted == [(path, code) for path, code, _ in seen]
    assert all(0 <= seconds < 60 for _, _, seconds in seen)


def test_a_server_whose_engine_is_dead_ends():
    engine = SimpleNamespace(failure=None)
    watch_ = SimpleNamespace(_each=[SimpleNamespace(core=SimpleNamespace(engine=engine))])
    http = SimpleNamespace(should_exit=False)

    async def watch():
        watching = asyncio.create_task(ServerWatch.engine(watch_, http))
        await asyncio.sleep(0)
        assert not http.should_exit
        engine.failure = RuntimeError("the device is gone")
        await watching

    asyncio.run(watch())
    assert http.should_exit


def test_the_log_of_a_start_names_each_phase_and_work_once(caplog):
    startup = Startup()
    with caplog.at_level("INFO"), startup.during("loading"):
        for part in (0.0, 0.1, 0.2):
            startup.progress("reading the file", part)
        startup.progress("writing", 0.5)
        startup.progress("ready", 1.0)
    assert ["loading", "reading the file", "writing: 50%"] == caplog.messages
    assert ["loading"] == list(startup.took_s)
