"""How a command finds the running server: the file, its mode, its end, and stale ones."""

import json
import os
import socket
import stat

import pytest

from cachesvc.server import server_file
from cachesvc.server.server_file import FILE_NAME, ServerSilent, announced, find_server, reachable
from tests.support.stand_in import Handler, StandIn, served

TOKEN = "op-test"


class Routes(Handler):
    """Answers as the admin routes do."""

    def do_GET(self) -> None:
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.say_json({"error": {"message": "who are you?"}}, 401)
        else:
            self.say_json({"actor": self.headers["X-Cachesvc-Actor"]})

    def do_POST(self) -> None:
        self.say_json({"got": self.read_json()})


@pytest.fixture
def url():
    with served(StandIn(Routes)) as server:
        yield server.url


def test_a_command_finds_the_server_and_speaks_with_it(tmp_path, url):
    with announced(tmp_path, url, TOKEN):
        assert 0o600 == stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode)
        server = find_server(tmp_path)
        assert os.getpid() == server.pid
        assert server.get("/x")["actor"].startswith("cli")
        assert {"got": {"a": 1}} == server.post("/x", {"a": 1})
        assert TOKEN not in repr(server)
    assert [] == list(tmp_path.iterdir())
    assert find_server(tmp_path) is None


def test_what_a_killed_server_left_is_not_taken_for_a_server(tmp_path, url):
    path = tmp_path / FILE_NAME
    path.write_text("{")
    assert find_server(tmp_path) is None
    path.write_text(json.dumps({"url": url, "pid": 2**22 + 1, "token": TOKEN}))
    assert find_server(tmp_path) is None
    path.write_text(json.dumps({"url": url, "pid": os.getpid(), "token": "of another"}))
    assert find_server(tmp_path) is None


def test_a_server_that_is_too_busy_to_answer_is_not_taken_for_a_stopped_one(tmp_path, monkeypatch):
    monkeypatch.setattr(server_file, "FIND_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            announced(tmp_path, url, TOKEN),
            pytest.raises(ServerSilent, match=f"0.05 s; try again, or end process {os.getpid()}"),
        ):
            find_server(tmp_path)
    assert find_server(tmp_path) is None


def test_a_server_on_all_addresses_is_reached_on_loopback():
    at = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "127.0.0.1": "127.0.0.1"}
    for host, expected in at.items():
        assert f"http://{expected}:80" == reachable(f"http://{host}:80")
