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
from typing import Any

import pytest

from tests.patience import PATIENCE_S


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The URL of a server that keeps nothing."""
    program = _program()
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
    deadline = time.monotonic() + PATIENCE_S
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


NODES = 3
SLOTS = 16384


@contextmanager
def redis_cluster(folder: Path) -> Iterator[tuple[str, list["subprocess.Popen[bytes]"]]]:
    """The URL of a cluster of three nodes that keep nothing, each with a third of the slots.

    A node that is killed is not replaced: its slots fail, those of the others are served.
    """
    import redis

    program = _program()
    ports = [_free_port() for _ in range(NODES)]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for port in ports:
            options = [
                "--port",
                str(port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--dir",
                str(folder),
            ]
            options += ["--cluster-enabled", "yes", "--cluster-config-file", f"nodes-{port}.conf"]
            options += ["--cluster-port", str(_free_port()), "--cluster-node-timeout", "1000"]
            options += ["--cluster-require-full-coverage", "no"]
            log_path = folder / f"redis-{port}.log"
            with log_path.open("wb") as log:
                nodes.append(subprocess.Popen([program, *options], stdout=log, stderr=log))
            _wait(port, nodes[-1], log_path)
        clients = [redis.Redis(port=port, socket_timeout=5) for port in ports]
        for number, client in enumerate(clients):
            first, end = number * SLOTS // NODES, (number + 1) * SLOTS // NODES
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", str(first), str(end - 1))
        for port, node in zip(ports[1:], nodes[1:], strict=True):
            assert node.poll() is None
            bus = clients[ports.index(port)].config_get("cluster-port")["cluster-port"]
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", str(port), str(bus))
        deadline = time.monotonic() + PATIENCE_S
        while any(_cluster_state(client) != ("ok", NODES) for client in clients):
            if time.monotonic() > deadline:
                pytest.fail("the Redis cluster did not come together")
            time.sleep(0.05)
        for client in clients:
            client.close()
        yield f"redis+cluster://127.0.0.1:{ports[0]}", nodes
    finally:
        for node in nodes:
            node.kill()
            node.wait(20)


def _cluster_state(client: Any) -> tuple[str, int]:
    told = client.execute_command("CLUSTER", "INFO").decode().split()
    info = dict(line.split(":", 1) for line in told)
    return info["cluster_state"], int(info["cluster_known_nodes"])


def _program() -> str:
    program = shutil.which("redis-server")
    if not program:
        reason = "no redis-server in PATH"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return program
