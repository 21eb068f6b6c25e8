"""The start of a server as its user sees it: on a terminal, and through its port meanwhile."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.support.models import save_tiny_model
from tests.terminal import on_a_terminal

pytestmark = pytest.mark.timeout(1800)

SCRIPT = Path(sys.executable).with_name("cachesvc")
BAR = "━"
SIZES = ("--device-cache", "8MiB", "--host-cache", "8MiB", "--disk-cache", "16MiB")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(folder)
    return folder


def arguments(model: Path, data_dir: Path, port: int = 0) -> list[str]:
    where = ["--port", str(port), "--data-dir", str(data_dir), "--model", model.name]
    return [str(SCRIPT), "serve", *where, "--block-size", "16", *SIZES]


def test_a_terminal_shows_phases_then_the_url_and_the_link_and_no_bar_after_them(model, tmp_path):
    with on_a_terminal(arguments(model, tmp_path), model.parent) as terminal:
        terminal.read_until("admin/login?token=")
        for phase in ("importing torch", "loading tiny", "opening tiers and engine", "warming up"):
            assert phase in terminal.written
        text = "\n".join(terminal.lines)
        assert re.search(r"serves tiny on http://127\.0\.0\.1:\d+", text)
        assert "ready after" in text
        assert BAR not in text
        assert 0 == terminal.stop()
        text = "\n".join(terminal.lines)
        assert "stopped; the tiers were flushed" in text
        assert BAR not in text


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def ask(port: int, path: str) -> tuple[int, str, str | None]:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S
        ) as response:
            return response.status, response.read().decode(), None
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers.get("Retry-After")


def test_the_port_answers_while_the_model_loads_and_is_ready_when_it_has(model, tmp_path):
    """The first answers come before torch is imported, which takes seconds."""
    port = free_port()
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            arguments(model, tmp_path / "data", port), cwd=model.parent, stdout=out, stderr=out
        )
    try:
        while not log.read_text().count("answers 503 until"):
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        early = {path: ask(port, path) for path in ("/health", "/health/ready", "/v1/models")}
        assert (200, {"status": "ok"}) == (early["/health"][0], json.loads(early["/health"][1]))
        status, body, retry = early["/health/ready"]
        assert (503, "2") == (status, retry)
        assert json.loads(body)["reason"].startswith("the server is starting: ")
        assert (503, "starting") == (
            early["/v1/models"][0],
            json.loads(early["/v1/models"][1])["error"]["code"],
        )
        statuses = [ask(port, "/health/ready")[0]]
        while statuses[-1] != 200:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
            statuses.append(ask(port, "/health/ready")[0])
        assert {503, 200} == set(statuses), "between the two, connections wait; none is refused"
        assert 200 == ask(port, "/v1/models")[0]
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
