"""How the tests find real programs, and how long they wait for them."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# It ends a test that hangs, and asserts no speed. Beside twenty busy processes on two cores,
# importing torch took 70 s.
PATIENCE_S = 600.0


def installed(name: str) -> str:
    """The program's path. Without it the test is skipped, and fails with CI=true."""
    path = shutil.which(name)
    if path is None:
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up(f"no {name} in PATH")
    return path


def ended(*command: object, **options: Any) -> "subprocess.CompletedProcess[str]":
    """A program that has ended, with what it printed."""
    told: dict[str, Any] = {"timeout": PATIENCE_S, "check": False, **options}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **told)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def until(holds: Callable[[], object]) -> None:
    """Look again and again until it holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it was waited for in vain"
        time.sleep(0.005)


def until_ready(
    ready: Callable[[], object],
    process: "subprocess.Popen[bytes]",
    log: Path,
    *errors: type[Exception],
) -> None:
    """Call `ready` until it raises none of the `errors`. Fails when the program ends before."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            ready()
            return
        except errors:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{process.args!r} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.03)
