"""What holds for every test: no network, few threads, and nothing left running afterwards."""

import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import psutil
import pytest
import structlog

from engine import garbage

if TYPE_CHECKING:
    from engine.operators.library import Operators

pytest_plugins = ["tests.databases"]

WORKER_BYTES = 5 << 30  # of a worker with an engine of the default model and a server

ROOM = 6 << 30  # bytes of address space
DISK_ROOM = 16 << 30  # all tests together take some of it
_COLLECTED = pytest.StashKey[int]()

# Hundreds of engines are composed here, and each would scan all that is imported: once is enough.
pytest_collection_finish, _THAW = garbage.freeze_loaded, garbage.thaw
garbage.freeze_loaded = garbage.thaw = lambda: None

_connect = socket.socket.connect
_LOOPBACK = ("127.", "localhost", "::1")
_HAS_PROC = Path("/proc/self/statm").exists()


def pytest_xdist_auto_num_workers() -> int:
    """One more than the processors where memory allows it: tests wait for servers half of the time.

    `PYTEST_XDIST_AUTO_NUM_WORKERS` says otherwise.
    """
    if asked := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return int(asked)
    processors = len(os.sched_getaffinity(0)) if _HAS_PROC else os.cpu_count() or 1
    fits = psutil.virtual_memory().total >= (processors + 1) * WORKER_BYTES
    return processors + 1 if fits else processors


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Where a failed test runs once more, as in CI, its failure is told at once: a run that is cut
    short, or a test that then passes, would lose it."""

    def tell(report: pytest.TestReport) -> None:
        if report.outcome in {"failed", "rerun"}:
            terminal.write_line(f"\n{report.nodeid}: {report.outcome}\n{report.longreprtext}")

    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if config.getoption("--reruns", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        hook = {"pytest_runtest_logreport": staticmethod(tell)}
        config.pluginmanager.register(type("Failures", (), hook))


def _connect_to_loopback(sock: socket.socket, address: Any) -> None:
    is_remote = isinstance(address, tuple) and not str(address[0]).startswith(_LOOPBACK)
    if is_remote and sock.family in (socket.AF_INET, socket.AF_INET6):
        raise AssertionError(f"a test tried to reach {address}; tests reach loopback only")
    _connect(sock, address)


@pytest.fixture(autouse=True, scope="session")
def _no_network_and_no_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("CACHESVC_")]:
            patch.delenv(name)
        patch.setattr(socket.socket, "connect", _connect_to_loopback)
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("home")))
        _use_the_last_of_a_disk(tmp_path_factory.getbasetemp(), patch)
        yield


def _use_the_last_of_a_disk(temporary: Path, patch: pytest.MonkeyPatch) -> None:
    """Tiers leave 5 % of a file system to others. Where hardly more is free, tests take of it."""
    from tests.live_server import TAKES_RESERVE
    from tiers.disk.room import reserve_of
    from tiers.disk.storage import FileSystem, Storage

    def found_here(storage: Storage, path: Path) -> FileSystem:
        found = file_system(storage, path)
        others = path.stat().st_dev != temporary.stat().st_dev  # say, a test's own small disk
        return found if others else found._replace(free=found.free + reserve_of(None, found.total))

    file_system = Storage.file_system
    total, free = file_system(Storage(), temporary)
    if free < reserve_of(None, total) + DISK_ROOM:
        patch.setattr(Storage, "file_system", found_here)
        patch.setenv(TAKES_RESERVE, "1")


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command under test sends the log to a stream that is closed once the command has ended."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _no_memory_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines lie in cycles with 2 GiB of address space each, and some tests never close theirs. A
    process that asks for more than there is memory cannot fork, as for a server of another user.

    Collecting takes half a second, so it is done where the process has grown by `ROOM` since.
    """
    yield
    if _HAS_PROC and _address_space() > request.config.stash.get(_COLLECTED, 0) + ROOM:
        gc.collect()
        request.config.stash[_COLLECTED] = _address_space()


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 2
    while left := [thread for thread in set(threading.enumerate()) - before if not thread.daemon]:
        if time.monotonic() > deadline:
            pytest.fail(f"threads left running: {sorted(thread.name for thread in left)}")
        time.sleep(0.01)


@pytest.fixture
def freezes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.composition.freeze_loaded", pytest_collection_finish)
    monkeypatch.setattr("engine.composition.thaw", _THAW)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads torch computes with, until the test ends."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def operators(tmp_path_factory: pytest.TempPathFactory) -> "Operators":
    """The compiled operators, loaded into this process."""
    from engine.operators.library import BUILT, Operators

    compiled = Operators(tmp_path_factory.mktemp("operators"), BUILT)
    if compiled.missing is not None and not os.environ.get("CI"):
        pytest.skip(compiled.missing)
    assert compiled.load(patience_s=None)
    return compiled
