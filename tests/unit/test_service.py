"""The composition root's own decisions: addresses, secrets, signals, counted responses."""

import asyncio
import errno
import socket
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cachesvc.config.errors import ConfigError
from cachesvc.config.places import disk_path
from cachesvc.config.sections import ServerSection
from cachesvc.server.http import Timed
from cachesvc.server.listen import bind, check_address, is_loopback, listen, make_data_dir
from cachesvc.server.startup import Startup
from cachesvc.server.watch import ServerWatch
from tiers.disk.directory import DirectoryLock
from tiers.errors import DirectoryLocked


def test_only_addresses_of_this_machine_are_loopback():
    ours = ("127.0.0.1", "127.9.9.9", "::1", "localhost")
    others = ("0.0.0.0", "::", "192.168.1.5", "localhost.example.org")
    assert list(ours) == [host for host in (*ours, *others) if is_loopback(host)]


def test_an_open_server_is_refused_any_other_address():
    check_address(ServerSection(host="127.0.0.1"), requires_keys=False)
    check_address(ServerSection(host="0.0.0.0"), requires_keys=True)
    with pytest.raises(ConfigError, match="--require-keys"):
        check_address(ServerSection(host="0.0.0.0"), requires_keys=False)


def test_a_port_in_use_is_said_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another --port"):
            bind("127.0.0.1", taken.getsockname()[1])


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


def refused_without_torch(data_dir, *flags):
    """What `serve` refuses with, in a process of its own; torch must not have been imported."""
    code = (
        "import sys\n"
        "from cachesvc.cli import app\n"
        f"try: app({['serve', '--data-dir', str(data_dir), *flags]!r}, standalone_mode=False)\n"
        "except SystemExit as left:\n"
        "    print('torch' in sys.modules, type(left.__context__).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def test_a_port_or_a_data_directory_in_use_is_refused_before_the_model_is_imported(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert "False ConfigError" == refused_without_torch(tmp_path, "--port", port)
    disk_path(tmp_path).mkdir()
    lock = DirectoryLock(disk_path(tmp_path))
    try:
        assert "False DirectoryLocked" == refused_without_torch(tmp_path, "--port", "0")
    finally:
        lock.release()


def test_a_model_that_is_not_there_is_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "empty").mkdir()
    data = tmp_path / "data"
    for model in ("no-such-model", str(tmp_path / "nothing"), str(tmp_path / "empty"), __file__):
        assert "False ModelError" == refused_without_torch(data, "--model", model)
    adapter = ("--adapter", f"sql={tmp_path / 'nothing'}")
    assert "False AdapterError" == refused_without_torch(data, *adapter)


@pytest.mark.timeout(300)
def test_tiers_that_cannot_be_are_refused_before_torch_is_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("CACHESVC_CACHE__POLICY", "sieve")
    assert "False ConfigError" == refused_without_torch(tmp_path, "--port", "0")
    monkeypatch.delenv("CACHESVC_CACHE__POLICY")
    monkeypatch.setenv("CACHESVC_CACHE__REMOTE_URL", "ftp://127.0.0.1/blocks")
    assert "False ConfigurationError" == refused_without_torch(tmp_path, "--port", "0")
    no_disk = refused_without_torch(tmp_path, "--port", "0", "--disk-cache", "0")
    assert "False ConfigError" == no_disk
    monkeypatch.setenv("CACHESVC_CACHE__REMOTE_URL", "redis://127.0.0.1:1")
    monkeypatch.setenv("CACHESVC_CACHE__REMOTE_KEY_FILE", str(tmp_path / "nothing"))
    assert "False ConfigurationError" == refused_without_torch(tmp_path, "--port", "0")


def test_the_data_directory_is_private_and_not_shared_by_two_servers(tmp_path):
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


def test_a_data_directory_that_cannot_be_used_is_said_so(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file; --data-dir names a folder"):
        make_data_dir(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"cannot make .*; check --data-dir"):
        make_data_dir(tmp_path / "file" / "below")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # tests may run as root
    with pytest.raises(ConfigError, match="this user cannot write"):
        make_data_dir(tmp_path / "of-another")


class Recorder:
    """Stands for the metrics."""

    def __init__(self):
        self.seen = []

    def observe_http(self, route, code, seconds):
        assert seconds >= 0
        self.seen.append((route, code))


def drive(app, path):
    async def nothing(*_):
        return {"type": "http.request"}

    asyncio.run(app({"type": "http", "path": path}, nothing, nothing))


def test_responses_are_counted_by_their_code_also_when_they_fail():
    async def answer(scope, receive, send):
        if scope["path"] == "/broken":
            raise ZeroDivisionError
        if scope["path"] != "/left":
            await send({"type": "http.response.start", "status": 204})

    recorder = Recorder()
    timed = Timed(answer, recorder)
    drive(timed, "/fine")
    with pytest.raises(ZeroDivisionError):
        drive(timed, "/broken")
    drive(timed, "/left")
    assert [("/fine", 204), ("/broken", 500), ("/left", 499)] == recorder.seen


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
