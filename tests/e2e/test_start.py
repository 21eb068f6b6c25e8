"""The start of a server as its user sees it: on a terminal, and at its port meanwhile."""

import re
import signal
import subprocess
import time

import httpx
import pytest

from tests.live_server import LiveServer
from tests.patience import PATIENCE_S, free_port
from tests.support.models import save_tiny_model
from tests.terminal import on_a_terminal

pytestmark = pytest.mark.timeout(1800)

BAR = "━"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(folder)
    return folder


def test_a_terminal_shows_phases_then_the_url_and_the_link_and_no_bar_after_them(model, tmp_path):
    with on_a_terminal(LiveServer(tmp_path, model).command(), model.parent) as terminal:
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


def ask(port: int) -> int | str:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=PATIENCE_S).status_code
    except httpx.ConnectError:
        return "refused"


def test_the_port_refuses_connections_until_the_server_is_ready(model, tmp_path):
    port = free_port()
    log = tmp_path / "log"
    with log.open("w") as out:
        command = [*LiveServer(tmp_path, model).command(), "--port", str(port)]
        process = subprocess.Popen(command, cwd=model.parent, stdout=out, stderr=out)
    try:
        while "importing torch" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        answers = [ask(port)]
        while answers[-1] != 200:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
            answers.append(ask(port))
        assert "refused" == answers[0], "before the model is loaded"
        assert {"refused", 200} == set(answers)
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
