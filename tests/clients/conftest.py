"""The clients' environments (`make test-clients`), one server for all of them, their results."""

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.bench.report import commit, machine
from tests.clients.matrix import PROGRAMS, Program
from tests.live_server import SCRIPT, LiveServer
from tests.patience import ended
from tests.support.litellm import litellm

PROGRAM_S = 900
MODEL = "smollm2-135m"
SPENT = "spent-out"  # as in programs/cells.py, which imports nothing of the server


class DefaultServer(LiveServer):
    """The default model with room for an agent's instructions."""

    sizes = ("--device-cache", "512MiB", "--host-cache", "256MiB", "--disk-cache", "256MiB")

    def limit(self, user: str) -> None:
        """A hard limit of this user that any request would pass."""
        of = ("--of", "user", "--value", user, "--reason", "test")
        command = [SCRIPT, "tenants", "budget", "cap", "default", "0.000000001", *of]
        subprocess.run([*command, "--data-dir", self.data_dir], check=True, timeout=self.start_s)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--clients-json", help="write what the clients did to this file")


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    running = DefaultServer(folder, folder / MODEL, OMP_NUM_THREADS="1")
    try:
        url = running.start()
        running.limit(SPENT)
        yield url
        running.stop()
    finally:
        running.kill()


@pytest.fixture(scope="session")
def ran(server, pytestconfig, tmp_path_factory):
    """What a program told of its cells; each runs once."""
    told: dict[str, dict[str, Any]] = {}

    def run(name: str) -> dict[str, Any]:
        if name not in told:
            program = PROGRAMS[name]
            with _before(name, program, server, tmp_path_factory.mktemp("before")) as url:
                told[name] = _told(name, program, url)
        return told[name]

    yield run
    if file := pytestconfig.getoption("--clients-json", None):
        _write(Path(file), told)


def _write(file: Path, told: dict[str, dict[str, Any]]) -> None:
    """Writes what was told; what the file says of other clients stays."""
    before = json.loads(file.read_text(encoding="utf-8"))["clients"] if file.exists() else {}
    where = {"commit": commit(), "machine": machine()}
    clients = before | {name: where | each for name, each in told.items()}
    results = {"clients": dict(sorted(clients.items()))}
    file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _before(
    name: str, program: Program, url: str, folder: Path
) -> contextlib.AbstractContextManager[str]:
    """What the program asks: the server, or a proxy before it."""
    if name != "litellm proxy" or not program.environment.exists():
        return contextlib.nullcontext(url)
    return litellm(Path(program.interpreter).with_name("litellm"), url, folder, MODEL)


def _told(name: str, program: Program, url: str) -> dict[str, Any]:
    if not program.environment.exists():
        pytest.fail(f"{program.environment} is missing; run make test-clients")
    command = [program.interpreter, program.path, url, MODEL, program.environment]
    done = ended(*command, timeout=PROGRAM_S)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, f"{name} told nothing: {done.stderr[-3000:]}"
    packages, *cells = lines
    return {**packages, "cells": {line.pop("cell"): line for line in cells}}
