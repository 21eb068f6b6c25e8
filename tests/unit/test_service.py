"""The composition root's own decisions: addresses, secrets, signals, counted responses."""

import asyncio
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from cachesvc.config import ConfigError, ServerSection, disk_path
from cachesvc.server.http import Timed, bind, is_loopback
from cachesvc.server.money import read_secret
from cachesvc.service import check_address, make_data_dir
from tiers.disk.directory import DirectoryLock
from tiers.errors import DirectoryLocked


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.5", False),
        ("localhost.example.org", False),
    ],
)
def test_only_addresses_of_this_machine_are_loopback(host: str, loopback: bool) -> None:
    assert loopback == is_loopback(host)


def test_an_open_server_is_refused_any_other_address() -> None:
    check_address(ServerSection(host="127.0.0.1"), requires_keys=False)
    check_address(ServerSection(host="0.0.0.0"), requires_keys=True)
    with pytest.raises(ConfigError, match="--require-keys"):
        check_address(ServerSection(host="0.0.0.0"), requires_keys=False)


def test_a_port_in_use_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another --port"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_the_secret_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    secret = read_secret(tmp_path)
    assert 32 == len(secret)
    assert secret == read_secret(tmp_path)
    assert 0o600 == stat.S_IMODE((tmp_path / "secret").stat().st_mode)
    assert [tmp_path / "secret"] == list(tmp_path.iterdir())


def test_the_data_directory_is_private_and_not_shared_by_two_servers(tmp_path: Path) -> None:
    path = tmp_path / "data"
    make_data_dir(path)
    assert 0o700 == stat.S_IMODE(path.stat().st_mode)
    disk_path(path).mkdir()
    lock = DirectoryLock(disk_path(path))
    try:
        with pytest.raises(DirectoryLocked, match="served by pid"):
            make_data_dir(path)
    finally:
        lock.release()


class Recorder:
    """Stands for the metrics."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def observe_http(self, route: str, code: int, seconds: float) -> None:
        assert seconds >= 0
        self.seen.append((route, code))


def drive(app: Any, path: str) -> None:
    async def nothing(*_: Any) -> dict[str, Any]:
        return {"type": "http.request"}

    asyncio.run(app({"type": "http", "path": path}, nothing, nothing))


def test_responses_are_counted_by_their_code_also_when_they_fail() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/broken":
            raise ZeroDivisionError
        if scope["path"] != "/left":
            await send({"type": "http.response.start", "status": 204})

    recorder: Any = Recorder()
    timed = Timed(answer, recorder)
    drive(timed, "/fine")
    with pytest.raises(ZeroDivisionError):
        drive(timed, "/broken")
    drive(timed, "/left")
    assert [("/fine", 204), ("/broken", 500), ("/left", 499)] == recorder.seen
