"""A private Redis in memory, for the tests of what servers share through it.

Uses `redis-server` of this machine; where it is not installed the tests are skipped, and fail with
CI=true.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_S = 20


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The URL of a server that keeps nothing."""
    program = shutil.which("redis-server")
    if not program:
        reason = "no redis-server in PATH"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    port = _free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with (folder / "redis.log").open("wb") as log:
        server = subprocess.Popen([program, *options], stdout=log, stderr=log)
    try:
        _wait(port, server, folder / "redis.log")
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait(20)


def _wait(port: int, server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"Redis did not start: {log.read_text()[-2000:]}")
            time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
