"""A private Redis in memory, for the tests of what servers share through it: `redis-server` of this
machine."""

import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager

import pytest

from tests.patience import PATIENCE_S, free_port, installed, until_ready

NODES = 3
SLOTS = 16384


@contextmanager
def redis_server(folder):
    """The URL of a server that keeps nothing."""
    port = free_port()
    with _running(folder, port):
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def redis_cluster(folder):
    """The URL of a cluster of three nodes that keep nothing, each with a third of the slots.

    A node that is killed is not replaced: its slots fail, those of the others are served.
    """
    import redis

    ports, buses = ([free_port() for _ in range(NODES)] for _ in range(2))
    with ExitStack() as scope:
        nodes = []
        for port, bus in zip(ports, buses, strict=True):
            options = ("--cluster-enabled", "yes", "--cluster-config-file", f"nodes-{port}.conf")
            options += ("--cluster-port", str(bus), "--cluster-node-timeout", "1000")
            options += ("--cluster-require-full-coverage", "no")
            nodes.append(scope.enter_context(_running(folder, port, *options)))
        clients = [redis.Redis(port=port, socket_timeout=5) for port in ports]
        for number, client in enumerate(clients):
            first, end = number * SLOTS // NODES, (number + 1) * SLOTS // NODES
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", str(first), str(end - 1))
        for port, bus in zip(ports[1:], buses[1:], strict=True):
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", str(port), str(bus))
        deadline = time.monotonic() + PATIENCE_S
        while any(_cluster_state(client) != ("ok", NODES) for client in clients):
            if time.monotonic() > deadline:
                pytest.fail("the Redis cluster did not come together")
            time.sleep(0.05)
        for client in clients:
            client.close()
        yield f"redis+cluster://127.0.0.1:{ports[0]}", nodes


@contextmanager
def _running(folder, port, *options):
    command = [installed("redis-server"), "--port", str(port), "--bind", "127.0.0.1"]
    command += ["--save", "", "--dir", str(folder), *options]
    path = folder / f"redis-{port}.log"
    with path.open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:

        def connect():
            socket.create_connection(("127.0.0.1", port), timeout=1).close()

        until_ready(connect, server, path, OSError)
        yield server
    finally:
        server.kill()
        server.wait(20)


def _cluster_state(client):
    told = client.execute_command("CLUSTER", "INFO").decode().split()
    info = dict(line.split(":", 1) for line in told)
    return info["cluster_state"], int(info["cluster_known_nodes"])
